"""The values that cross process boundaries, as plain frozen dataclasses. Knows no protobuf and no transport.

Field meanings, units and ranges are those of the messages of the same names in `proto/specsplit/v1`; the
codec converts between the two and is the only place that does.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

WIRE_VERSION = 1
REQUEST_ID_BYTES = 16
MAX_DRAFT = 32
MAX_LOGPROBS = 20
MAX_TEMPERATURE = 100.0
MIN_TOP_P = 2.0**-1022  # the smallest normal double: devices may take a smaller number for 0

RequestId: TypeAlias = bytes
TokenIds: TypeAlias = Sequence[int]


def new_request_id() -> RequestId:
    return secrets.token_bytes(REQUEST_ID_BYTES)


def new_incarnation() -> bytes:
    return secrets.token_bytes(16)


class VerificationMode(enum.IntEnum):
    COUPLED = 1
    REJECTION = 2


class FinishReason(enum.IntEnum):
    STOP = 1
    LENGTH = 2

    @property
    def openai(self) -> str:
        return self.name.lower()


class Status(enum.IntEnum):
    OK = 1
    STALE_BASE = 2
    DIGEST_MISMATCH = 3
    UNKNOWN_REQUEST = 4
    NOT_OWNER = 5
    STALE_GENERATION = 6
    PREEMPTED = 7
    INVALID = 8
    UNSUPPORTED = 9
    TOO_LONG = 10
    NUMERIC_ERROR = 11
    INTERNAL = 12
    DRAINING = 13


class DraftStatus(enum.IntEnum):
    OK = 1
    NEED_CONTEXT = 2
    INVALID = 3


class NoDraftReason(enum.IntEnum):
    OFF = 1
    NO_MATCH = 2
    DRAFTER_AWAY = 3
    NO_ROOM = 4


@dataclass(frozen=True, slots=True, order=True)
class Order:
    """Place of a request among others; compared field by field, the id breaks ties."""

    priority: int
    arrival_us: int
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class SamplingParams:
    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    verification: VerificationMode = VerificationMode.COUPLED
    num_logprobs: int | None = None
    report_margins: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    ids: tuple[int, ...]
    probs: tuple[float, ...]


# --- verifier ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VerifierDescription:
    model: str
    revision: str
    dtype: str
    numerics: str
    tokenizer_digest: str
    vocab_size: int
    max_sequence_tokens: int
    block_size: int
    num_blocks: int
    max_step_tokens: int
    max_step_rows: int
    incarnation: bytes
    registry_namespace: bytes
    eos_token_ids: tuple[int, ...]
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    wire_version: int = WIRE_VERSION


@dataclass(frozen=True, slots=True)
class OpenRequest:
    request_id: RequestId
    generation: int
    order: Order
    prompt_ids: TokenIds
    output_ids: TokenIds
    sampling: SamplingParams
    cache_salt: bytes = b""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class CloseRequest:
    request_id: RequestId
    generation: int


@dataclass(frozen=True, slots=True)
class Assumption:
    draft_ids: TokenIds
    bonus_id: int


@dataclass(frozen=True, slots=True)
class StepRow:
    request_id: RequestId
    generation: int
    base_len: int
    digest: int
    num_computed: int
    num_tokens: int
    draft_ids: TokenIds = ()
    draft_probs: tuple[SparseDistribution, ...] = ()
    assumes: Assumption | None = None

    @property
    def is_sampling(self) -> bool:
        return self.num_computed + self.num_tokens == self.base_len


@dataclass(frozen=True, slots=True)
class Step:
    step_id: int
    rows: tuple[StepRow, ...]


@dataclass(frozen=True, slots=True)
class Capacity:
    max_steps_in_flight: int
    free_blocks: int


@dataclass(frozen=True, slots=True)
class Opened:
    request_id: RequestId
    generation: int
    status: Status
    free_blocks: int
    cached_tokens: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RowDone:
    request_id: RequestId
    generation: int
    base_len: int
    status: Status
    num_computed: int = 0
    committed_ids: TokenIds = ()
    num_accepted: int = 0
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    margins: tuple[float, ...] = ()
    is_replay: bool = False
    detail: str = ""


@dataclass(frozen=True, slots=True)
class StepDone:
    step_id: int
    rows: tuple[RowDone, ...]
    queue_us: int
    forward_us: int
    sample_us: int
    idle_us: int
    batch_tokens: int
    batch_rows: int
    free_blocks: int
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Preempted:
    request_id: RequestId
    generation: int
    free_blocks: int


VerifierCommand: TypeAlias = OpenRequest | Step | CloseRequest
VerifierEvent: TypeAlias = Capacity | Opened | StepDone | Preempted


# --- drafter ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DrafterDescription:
    name: str
    max_draft: int
    tokenizer_digest: str
    incarnation: bytes
    wire_version: int = WIRE_VERSION


@dataclass(frozen=True, slots=True)
class DraftRow:
    request_id: RequestId
    generation: int
    base_len: int
    digest: int
    new_ids: TokenIds
    max_draft: int
    prompt_len: int = 0
    sampling: SamplingParams | None = None
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class DraftBatch:
    batch_id: int
    rows: tuple[DraftRow, ...]


@dataclass(frozen=True, slots=True)
class CloseDraft:
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class DraftRowDone:
    request_id: RequestId
    generation: int
    base_len: int
    status: DraftStatus
    draft_ids: TokenIds = ()
    confidence: tuple[float, ...] = ()
    draft_probs: tuple[SparseDistribution, ...] = ()
    match_len: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class DraftBatchDone:
    batch_id: int
    rows: tuple[DraftRowDone, ...]
    draft_us: int
    traceparent: str = ""


DraftCommand: TypeAlias = DraftBatch | CloseDraft


# --- gateway ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Speculation:
    """`k` is None for the server's default, 0 for off."""

    k: int | None = None
    drafter: str = ""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """What a client asks for, before validation. None means "the server's default" throughout.

    `prompt` is text, token ids, or a conversation.
    """

    prompt: str | tuple[int, ...] | tuple[ChatMessage, ...]
    model: str = ""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    report_margins: bool = False
    cache_salt: str = ""
    priority: int = 0
    speculation: Speculation = Speculation()
    verification: VerificationMode = VerificationMode.COUPLED


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    steps: int
    drafted: int
    accepted: int
    accepted_by_position: tuple[int, ...]
    no_draft_reason: NoDraftReason | None = None


@dataclass(frozen=True, slots=True)
class Started:
    request_id: RequestId
    prompt_ids: TokenIds
    seed: int


@dataclass(frozen=True, slots=True)
class Delta:
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    margins: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    finish_reason: FinishReason
    usage: Usage


GenerateEvent: TypeAlias = Started | Delta | Finished


@dataclass(frozen=True, slots=True)
class ModelCard:
    id: str
    max_sequence_tokens: int
