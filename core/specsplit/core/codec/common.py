"""Conversion of what several messages share; raises InvalidRequest naming the field out of range."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

from specsplit.core.errors import InvalidRequest
from specsplit.core.types import (
    MAX_LOGPROBS,
    MAX_TEMPERATURE,
    MIN_TOP_P,
    REQUEST_ID_BYTES,
    Order,
    RequestId,
    SamplingParams,
    SparseDistribution,
    TokenLogprobs,
    VerificationMode,
)
from specsplit.v1 import common_pb2

EnumT = TypeVar("EnumT", bound=enum.IntEnum)


def request_id(value: bytes) -> RequestId:
    if len(value) != REQUEST_ID_BYTES:
        raise InvalidRequest(f"must be {REQUEST_ID_BYTES} bytes, not {len(value)}", field="request_id")
    return value


def enum_member(kind: type[EnumT], value: int, *, field: str) -> EnumT:
    """The member of that number; the wire may carry any, also 0 for unset and those of later versions."""
    try:
        return kind(value)
    except ValueError:
        raise InvalidRequest(f"unknown {field} {value}", field=field) from None


def verification_mode(value: int) -> VerificationMode:
    if value == common_pb2.VERIFICATION_MODE_UNSPECIFIED:
        return VerificationMode.COUPLED
    return enum_member(VerificationMode, value, field="verification")


def order_from_pb(pb: common_pb2.Order, id_: RequestId) -> Order:
    return Order(pb.priority, pb.arrival_us, id_)


def order_to_pb(order: Order) -> common_pb2.Order:
    return common_pb2.Order(priority=order.priority, arrival_us=order.arrival_us)


def check_sampling(params: SamplingParams) -> SamplingParams:
    """The ranges that the wire promises; the same check serves clients' bodies and peers' messages."""

    def refuse(field: str, rule: str, value: object) -> InvalidRequest:
        return InvalidRequest(f"{field} must be {rule}, not {value}", field=field)

    if not (math.isfinite(params.temperature) and 0 <= params.temperature <= MAX_TEMPERATURE):
        raise refuse("temperature", f"between 0 and {MAX_TEMPERATURE:g}", params.temperature)
    if not 0 <= params.top_k < 2**31:
        raise refuse("top_k", "0 (off) or a positive 31-bit integer", params.top_k)
    if not MIN_TOP_P <= params.top_p <= 1:
        raise refuse("top_p", f"greater than 0 (at least {MIN_TOP_P:.3g}) and at most 1", params.top_p)
    if not 0 <= params.min_p <= 1:
        raise refuse("min_p", "between 0 and 1", params.min_p)
    if not 0 <= params.seed < 2**64:
        raise refuse("seed", "an unsigned 64-bit integer", params.seed)
    if params.max_tokens < 1:
        raise refuse("max_tokens", "at least 1", params.max_tokens)
    if not 0 <= params.min_tokens <= params.max_tokens:
        raise refuse("min_tokens", f"between 0 and max_tokens ({params.max_tokens})", params.min_tokens)
    if params.num_logprobs is not None and not 0 <= params.num_logprobs <= MAX_LOGPROBS:
        raise refuse("num_logprobs", f"between 0 and {MAX_LOGPROBS}", params.num_logprobs)
    return params


def sampling_from_pb(pb: common_pb2.SamplingParams) -> SamplingParams:
    return check_sampling(
        SamplingParams(
            temperature=pb.temperature,
            top_k=pb.top_k,
            top_p=pb.top_p,
            min_p=pb.min_p,
            seed=pb.seed,
            max_tokens=pb.max_tokens,
            min_tokens=pb.min_tokens,
            stop_token_ids=tuple(pb.stop_token_ids),
            ignore_eos=pb.ignore_eos,
            verification=verification_mode(pb.verification),
            num_logprobs=pb.num_logprobs if pb.HasField("num_logprobs") else None,
            report_margins=pb.report_margins,
        )
    )


def sampling_to_pb(params: SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        verification=common_pb2.VerificationMode.ValueType(params.verification),
        num_logprobs=params.num_logprobs,
        report_margins=params.report_margins,
    )


def logprobs_from_pb(pbs: Iterable[common_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(pb.logprob, tuple(pb.top_ids), tuple(pb.top_logprobs)) for pb in pbs)


def logprobs_to_pb(items: Iterable[TokenLogprobs]) -> list[common_pb2.TokenLogprobs]:
    return [
        common_pb2.TokenLogprobs(logprob=t.logprob, top_ids=t.top_ids, top_logprobs=t.top_logprobs)
        for t in items
    ]


def distributions_from_pb(
    pbs: Iterable[common_pb2.SparseDistribution],
) -> tuple[SparseDistribution, ...]:
    return tuple(SparseDistribution(tuple(pb.ids), tuple(pb.probs)) for pb in pbs)


def distributions_to_pb(items: Iterable[SparseDistribution]) -> list[common_pb2.SparseDistribution]:
    return [common_pb2.SparseDistribution(ids=d.ids, probs=d.probs) for d in items]


def stats_to_pb(counters: Mapping[str, int]) -> common_pb2.StatsReply:
    return common_pb2.StatsReply(
        counters=[common_pb2.Counter(name=name, value=value) for name, value in counters.items()]
    )


def stats_from_pb(pb: common_pb2.StatsReply) -> dict[str, int]:
    return {counter.name: counter.value for counter in pb.counters}
