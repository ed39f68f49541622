"""Finds and reads a causal LM; refuses the kinds that paged attention cannot run exactly. Runs nothing."""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from specsplit.engine.errors import ModelLoadError, UnsupportedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")
_SAMPLES, _SAMPLE_BYTES = 256, 4096


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where transformers reads a model: a hub name or folder, and the GGUF file within it if it is one."""

    folder: str
    gguf_file: str | None

    @property
    def options(self) -> dict[str, str]:
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}


def find_source(name: str) -> ModelSource:
    path = Path(name).expanduser()
    if not name.endswith(".gguf"):
        return ModelSource(str(path) if path.is_dir() else name, None)
    if path.is_file():
        return ModelSource(str(path.parent), path.name)
    owner, _, rest = name.partition("/")
    repository, _, file = rest.partition("/")
    if not file or path.is_absolute():
        raise ModelLoadError(f"there is no file {name}", field="model")
    return ModelSource(f"{owner}/{repository}", file)


def read_config(source: ModelSource, revision: str | None) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(source.folder, revision=revision or "main", **source.options)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read the model {source.folder}: {error}", field="model") from error


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(f"{config.model_type} is not a causal language model", field="model")
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]


def refuse_unsupported(config: PreTrainedConfig) -> None:
    """Raises UnsupportedModel, naming the layer kind, for what a configuration alone tells."""

    def refuse(reason: str) -> None:
        raise UnsupportedModel(f"{config.model_type} cannot be served: {reason}", field="model")

    text = config.get_text_config()
    if config.is_encoder_decoder:
        refuse("encoder-decoder models are not supported")
    if getattr(text, "alibi", False) or text.model_type in ("bloom", "mpt"):
        refuse("ALiBi position biases are not supported")
    kinds = sorted(set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES)
    if kinds:
        refuse(f"layers of the kind {', '.join(kinds)} are not supported")
    if getattr(text, "num_kv_shared_layers", None):
        refuse("layers that share another layer's KV are not supported")
    cls = model_class(config)
    if getattr(cls, "_is_stateful", False):
        refuse("recurrent layers (state space, linear attention) are not supported")
    if not getattr(cls, "_supports_attention_backend", False):
        refuse(f"{cls.__name__} does not take its attention from transformers' attention interface")
    if "logits_to_keep" not in inspect.signature(cls.forward).parameters:
        refuse(f"{cls.__name__} cannot compute logits for chosen positions only (logits_to_keep)")


def context_length(config: PreTrainedConfig) -> int:
    text = config.get_text_config()
    length: int | None = getattr(text, "max_position_embeddings", None)
    if length is None:
        raise UnsupportedModel(f"{config.model_type} does not state its context length", field="model")
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        # Their frequencies change with the longest sequence of a batch: exact only below the change.
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            original = parameters.get("original_max_position_embeddings")
            original = original or getattr(text, "original_max_position_embeddings", None)
            length = min(length, original or length)
    return length


def read_model(
    source: ModelSource, config: PreTrainedConfig, revision: str | None, dtype: str, device: str
) -> PreTrainedModel:
    """The model in eval mode on its device, with transformers' plain ("eager") attention."""
    try:
        model: Any
        model, report = AutoModelForCausalLM.from_pretrained(
            source.folder,
            config=config,
            revision=revision or "main",
            dtype=DTYPES[dtype],
            attn_implementation="eager",
            output_loading_info=True,
            **source.options,
        )
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read the model {source.folder}: {error}", field="model") from error
    if report["missing_keys"] or report["mismatched_keys"]:  # transformers fills these with random values
        wrong = sorted(report["missing_keys"]) or sorted(key for key, *_ in report["mismatched_keys"])
        raise ModelLoadError(
            f"{source.folder} lacks weights of its model: {', '.join(wrong[:3])}", field="model"
        )
    if source.gguf_file is not None:
        forget_quantization(model)
    return model.to(device).eval()


def forget_quantization(model: Any) -> None:
    """A GGUF file's weights come dequantised, but the model claims its file's format and cannot be saved."""
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def eos_token_ids(generation: GenerationConfig | None, config: PreTrainedConfig) -> tuple[int, ...]:
    found = generation.eos_token_id if generation is not None else None
    if found is None:
        found = config.get_text_config().eos_token_id
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)


def content_revision(source: ModelSource, config: PreTrainedConfig) -> str:
    """The hub's commit, or for local files a digest that any host with the same files finds.

    Weights are sampled, not read through: 256 pieces of 4 KiB over each file, with its name and size.
    """
    if not Path(source.folder).is_dir():
        return str(getattr(config, "_commit_hash", None) or "unknown")
    digest = hashlib.sha256()
    folder = Path(source.folder)
    files = [folder / source.gguf_file] if source.gguf_file else sorted(folder.iterdir())
    for file in files:
        if file.name == "config.json":
            digest.update(file.read_bytes())
        elif file.suffix in _WEIGHT_SUFFIXES:
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as stream:
                for sample in range(_SAMPLES):
                    stream.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                    digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
