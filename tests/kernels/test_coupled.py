"""Coupled verification: the CPU path equals the reference, and both keep what the rule promises."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from specsplit.core import noise as spec
from specsplit.kernels.coupled import (
    CoupledResult,
    CoupledRows,
    coupled_verify,
    coupled_verify_reference,
)

INF = float("inf")
VOCAB_SIZES = [17, 8193, 151_936]
# A test fails by chance once in a million runs of other seeds; with these fixed seeds it never does.
SIGNIFICANCE = 1e-6

DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0}
DTYPES = {"temperature": torch.float64, "top_p": torch.float64, "min_p": torch.float64}


def make_rows(drafts: list[list[int]], params: list[dict]) -> CoupledRows:
    """One sequence per entry; params give the columns that are not default."""
    columns = {}
    for name, default in DEFAULTS.items():
        values = [p.get(name, default) for p in params]
        if name == "seed":
            columns[name] = torch.from_numpy(np.array(values, np.uint64))
        else:
            columns[name] = torch.tensor(values, dtype=DTYPES.get(name, torch.int64))
    lengths = torch.tensor([0] + [len(d) + 1 for d in drafts])
    draft_ids = torch.tensor([d for draft in drafts for d in [*draft, 0]], dtype=torch.int64)
    return CoupledRows(offsets=lengths.cumsum(0), draft_ids=draft_ids, **columns)


def random_logits(seed: int, rows: int, vocab_size: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def assert_equal(a: CoupledResult, b: CoupledResult) -> None:
    assert a.num_sampled.tolist() == b.num_sampled.tolist()
    assert a.is_finite.tolist() == b.is_finite.tolist()
    assert a.tokens.tolist() == b.tokens.tolist()
    torch.testing.assert_close(a.margins, b.margins, rtol=1e-4, atol=1e-7)


def assert_valid(result: CoupledResult, logits: torch.Tensor, rows: CoupledRows) -> None:
    """Every token given out is in the vocabulary and was allowed."""
    for r, first in enumerate(rows.offsets[:-1].tolist()):
        for n in range(first, first + int(result.num_sampled[r])):
            token = int(result.tokens[n])
            assert 0 <= token < logits.shape[1]
            assert logits[n, token] > -INF
            assert result.margins[n] >= 0


SAMPLING = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-308, 1e-6, 0.3, 1.0, 2.0, 50.0]),
        "top_k": st.sampled_from([0, 0, 1, 2, 5, 40, 10**6]),
        "top_p": st.sampled_from([1.0, 1.0, 1e-6, 0.3, 0.9, 0.999]),
        "min_p": st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0]),
        "seed": st.sampled_from([0, (1 << 64) - 1, 1 << 63]) | st.integers(0, (1 << 64) - 1),
        "position": st.sampled_from([0, (1 << 31) - 64]) | st.integers(0, 100_000),
    }
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, CoupledRows]:
    """Ragged batches: broken rows, masked tokens, ties, drafts of which a random part is right."""
    vocab_size = draw(st.sampled_from([1, 2, 17, 64, 65, 1000, 8193]))
    params = draw(st.lists(SAMPLING, min_size=1, max_size=6))
    num_drafts = [draw(st.sampled_from([0, 1, 4, 32] if vocab_size < 100 else [0, 1, 4])) for _ in params]
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_rows = sum(num_drafts) + len(params)
    scale = draw(st.sampled_from([0.1, 3, 30]))
    logits = generator.normal(0, scale, (num_rows, vocab_size)).astype(np.float32)
    if draw(st.booleans()):
        logits = np.round(logits)  # many exact ties
    if draw(st.booleans()):
        logits[generator.random(logits.shape) < 0.5] = -INF
    for value in draw(st.lists(st.sampled_from([np.nan, INF, -np.nan]), max_size=2)):
        logits[generator.integers(num_rows), generator.integers(vocab_size)] = value
    tensor = torch.from_numpy(logits)

    # Right drafts come from following each sequence with the reference itself.
    rows = make_rows([[0] * n for n in num_drafts], params)
    each = replace(
        make_rows(
            [[]] * num_rows, [p for p, n in zip(params, num_drafts, strict=True) for _ in range(n + 1)]
        ),
        position=torch.cat(
            [p["position"] + torch.arange(n + 1) for p, n in zip(params, num_drafts, strict=True)]
        ),
    )
    drafts = coupled_verify_reference(tensor, each).tokens
    wrong = torch.from_numpy(generator.random(num_rows) < draw(st.sampled_from([0.0, 0.1, 0.5])))
    return tensor, replace(rows, draft_ids=torch.where(wrong, (drafts + 1) % vocab_size, drafts))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(batches())
def test_cpu_path_equals_reference(batch):
    logits, rows = batch
    before = logits.clone()
    result = coupled_verify(logits, rows)
    assert_equal(result, coupled_verify_reference(logits, rows))
    assert_valid(result, logits, rows)
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))


def test_cpu_path_equals_reference_on_a_large_vocabulary():
    params = [
        {"temperature": t, "top_k": k, "top_p": p, "min_p": m, "seed": 100 + i}
        for i, (t, k, p, m) in enumerate(
            [
                (0.0, 0, 1.0, 0.0),
                (1.0, 0, 1.0, 0.0),
                (0.8, 0, 0.95, 0.0),
                (1.0, 50, 0.9, 0.0),
                (2.0, 0, 0.999, 0.0),
                (1.0, 0, 1.0, 0.05),
                (0.3, 100_000, 1.0, 0.0),
                (1e-6, 1000, 0.5, 0.5),
            ]
        )
    ]
    logits = random_logits(0, len(params), 151_936)
    rows = make_rows([[]] * len(params), params)
    assert_equal(coupled_verify(logits, rows), coupled_verify_reference(logits, rows))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(batches(), st.randoms(use_true_random=False))
def test_a_sequence_does_not_depend_on_its_batch(batch, random):
    logits, rows = batch
    whole = coupled_verify(logits, rows)
    order = list(range(rows.temperature.numel()))
    random.shuffle(order)
    spans = [range(int(rows.offsets[r]), int(rows.offsets[r + 1])) for r in order]

    def take(members: list[int], member_spans: list[range]) -> tuple[torch.Tensor, CoupledRows]:
        index = torch.tensor([n for span in member_spans for n in span])
        columns = {
            f.name: torch.from_numpy(getattr(rows, f.name).numpy()[members])
            for f in fields(rows)
            if f.name not in ("offsets", "draft_ids")
        }
        offsets = torch.tensor([0] + [len(span) for span in member_spans]).cumsum(0)
        return logits[index], CoupledRows(offsets=offsets, draft_ids=rows.draft_ids[index], **columns)

    shuffled = coupled_verify(*take(order, spans))
    at = 0
    for i, (r, span) in enumerate(zip(order, spans, strict=True)):
        alone = coupled_verify(*take([r], [span]))
        here = slice(at, at + len(span))
        at += len(span)
        for got in (
            (alone.tokens, alone.margins, alone.num_sampled[0], alone.is_finite[0]),
            (shuffled.tokens[here], shuffled.margins[here], shuffled.num_sampled[i], shuffled.is_finite[i]),
        ):
            assert torch.equal(got[0], whole.tokens[span.start : span.stop])
            assert torch.equal(got[1], whole.margins[span.start : span.stop])
            assert got[2] == whole.num_sampled[r]
            assert got[3] == whole.is_finite[r]


@pytest.mark.parametrize("verify", [coupled_verify, coupled_verify_reference])
@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {}, {"temperature": 0.8, "top_p": 0.9, "top_k": 30}]
)
def test_text_is_the_same_with_any_drafts(verify, params):
    num, vocab_size = 33, 50
    generator = np.random.default_rng(1)
    logits = random_logits(2, num, vocab_size)  # row i stands for "the target's logits after i tokens"
    base = {"seed": 77, "position": 5} | params

    def follow(propose) -> list[int]:
        out: list[int] = []
        while len(out) < num:
            draft = propose(len(out))[: num - 1 - len(out)]
            rows = make_rows([draft], [base | {"position": 5 + len(out)}])
            result = verify(logits[len(out) : len(out) + len(draft) + 1], rows)
            accepted = int(result.num_sampled[0])
            assert result.tokens[: accepted - 1].tolist() == draft[: accepted - 1]
            out += result.tokens[:accepted].tolist()
        return out

    text = follow(lambda done: [])
    assert follow(lambda done: text[done : done + 32]) == text
    assert follow(lambda done: generator.integers(0, vocab_size, 4).tolist()) == text
    mixed = [t if generator.random() < 0.7 else 0 for t in text]
    assert follow(lambda done: mixed[done : done + 5]) == text
    full = verify(logits, make_rows([text[:-1]], [base]))
    assert full.num_sampled.tolist() == [num]
    assert full.tokens.tolist() == text


@pytest.mark.parametrize("verify", [coupled_verify, coupled_verify_reference])
def test_the_token_is_the_argmax_of_logit_and_noise(verify):
    logits = random_logits(3, 8, 17)
    params = [{"temperature": 0.7, "seed": (1 << 64) - 1 - r, "position": 40 + r} for r in range(8)]
    result = verify(logits, make_rows([[]] * 8, params))
    for r, p in enumerate(params):
        scores = [logits[r, v].item() / 0.7 + spec.gumbel(p["seed"], p["position"], v) for v in range(17)]
        assert result.tokens[r] == int(np.argmax(scores))
        best, second = sorted(scores)[::-1][:2]
        assert result.margins[r].item() == pytest.approx(best - second, rel=1e-5)


@pytest.mark.parametrize("verify", [coupled_verify, coupled_verify_reference])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_only_the_last_id_is_allowed(verify, vocab_size):
    params = [
        {"temperature": t, "top_k": k, "top_p": p, "seed": s}
        for t in (0.0, 1.0)
        for k, p, s in ((0, 1.0, 0), (1, 1.0, 1), (0, 1e-6, 2), (5, 0.5, 3))
    ]
    logits = torch.full((len(params), vocab_size), -INF)
    logits[:, -1] = -40.0
    result = verify(logits, make_rows([[]] * len(params), params))
    assert result.tokens.tolist() == [vocab_size - 1] * len(params)
    assert result.is_finite.all()
    assert torch.isinf(result.margins).all()


@pytest.mark.parametrize("verify", [coupled_verify, coupled_verify_reference])
def test_temperatures_and_filters_mixed_in_one_batch(verify):
    params = [
        {"temperature": 0.0},
        {"temperature": 1e-6},
        {"temperature": 1e-320},
        {"temperature": 1.0},
        {"temperature": 2.0},
        {"top_p": 1e-6},
        {"top_k": 1},
        {"min_p": 1.0},
    ]
    logits = random_logits(4, 1, 8193).repeat(len(params), 1)
    greedy = int(logits[0].argmax())
    result = verify(logits, make_rows([[]] * len(params), [p | {"seed": 9} for p in params]))
    tokens = result.tokens.tolist()
    assert [tokens[i] for i in (0, 1, 2, 5, 6, 7)] == [greedy] * 6
    assert tokens[3] != greedy
    assert tokens[4] != greedy
    assert result.is_finite.all()
    assert not result.margins.isnan().any()


@pytest.mark.parametrize("verify", [coupled_verify, coupled_verify_reference])
def test_lowest_id_wins_exact_ties_when_greedy(verify):
    logits = torch.zeros(3, 200)
    logits[1, [70, 150]] = 5.0
    logits[2] = -0.0
    logits[2, 90] = 0.0  # equal to -0.0
    result = verify(logits, make_rows([[]] * 3, [{"temperature": 0.0}] * 3))
    assert result.tokens.tolist() == [0, 70, 0]
    assert result.margins.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("verify", [coupled_verify, coupled_verify_reference])
@pytest.mark.parametrize("poison", [float("nan"), INF, None])
def test_a_broken_row_ends_its_own_sequence_only(verify, poison):
    logits = random_logits(5, 9, 300)
    params = [{"temperature": 0.0}, {"seed": 3}, {"temperature": 0.5, "seed": 4, "top_p": 0.9}]
    drafts = [[int(logits[0].argmax()), int(logits[1].argmax())], [299, 299], [299, 299]]
    rows = make_rows(drafts, params)
    clean = verify(logits, rows)
    assert clean.num_sampled.tolist() == [3, 1, 1]

    broken = logits.clone()
    for row in (1, 4, 6):  # reached after one token; never reached; reached at once
        broken[row, 299 if poison is not None else slice(None)] = poison if poison is not None else -INF
    result = verify(broken, rows)
    assert result.is_finite.tolist() == [False, True, False]
    assert result.num_sampled.tolist() == [1, 1, 0]
    assert result.tokens[[0, 3]].tolist() == clean.tokens[[0, 3]].tolist()
    assert result.margins[3] == clean.margins[3]
    assert ((result.tokens >= 0) & (result.tokens < 300)).all()


def sampled_frequencies(logits: list[float], params: dict, num: int, by: str) -> np.ndarray:
    """Counts of tokens over `num` seeds or positions."""
    rows = make_rows([[]] * num, [{"seed": 5} | params | {by: i} for i in range(num)])
    tokens = coupled_verify(torch.tensor([logits]).repeat(num, 1), rows).tokens
    return np.bincount(tokens.numpy(), minlength=len(logits))


@pytest.mark.parametrize("by", ["seed", "position"])
@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, 8),
        ({"temperature": 2.0}, 8),
        ({"temperature": 0.5}, 8),
        ({"top_k": 3}, 3),
        ({"top_p": 0.8}, 3),  # masses 0.49, 0.73, 0.85
        ({"min_p": 0.1}, 5),  # ratios to the first: 1, .5, .25, .14, .10, .05 ...
        ({"top_k": 4, "top_p": 0.9}, 3),  # renormalised over four: 0.53, 0.79, 0.93
        ({"min_p": 0.2, "top_p": 0.85}, 2),  # renormalised over three: 0.57, 0.86
    ],
)
def test_tokens_follow_the_filtered_distribution(params, kept, by):
    weights = np.array([0.5, 0.25, 0.125, 0.07, 0.0501, 0.025, 0.002, 0.001])
    logits = np.log(weights) - 7.0
    num = 20_000
    p = weights ** (1 / params.get("temperature", 1.0))
    p[kept:] = 0
    counts = sampled_frequencies(logits.tolist(), params, num, by)
    assert counts[kept:].sum() == 0
    assert stats.chisquare(counts[:kept], p[:kept] / p.sum() * num).pvalue > SIGNIFICANCE


def test_neighbouring_positions_and_seeds_draw_independently():
    num = 20_000

    def draw(seed_step: int, position: int) -> np.ndarray:
        params = [{"seed": i * 2 + seed_step, "position": position} for i in range(num)]
        return coupled_verify(torch.zeros(num, 5), make_rows([[]] * num, params)).tokens.numpy()

    first = draw(0, 0)
    for second in (draw(0, 1), draw(1, 0)):
        pairs = np.bincount(first * 5 + second, minlength=25)
        assert stats.chisquare(pairs).pvalue > SIGNIFICANCE


@pytest.mark.parametrize("verify", [coupled_verify, coupled_verify_reference])
def test_tokens_tied_at_a_boundary_are_all_kept(verify):
    num = 200
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, -2.0]]).repeat(num, 1)
    for params in ({"top_k": 2}, {"top_p": 0.75}):
        rows = make_rows([[]] * num, [params | {"seed": s} for s in range(num)])
        result = verify(logits, rows)
        assert set(result.tokens.tolist()) == {0, 1, 2, 3}
        # Rounding could break the tie: a tied token's margin says so.
        assert (result.margins[result.tokens != 0] == 0).all()


def test_a_margin_bounds_the_change_that_flips_a_token():
    """Logits moved by a third of the margin, and by no more than far above rounding, give the same token."""
    num, vocab_size = 400, 300
    generator = np.random.default_rng(6)
    params = [
        {
            "temperature": float(generator.choice([0.0, 0.5, 1.0, 2.0])),
            "top_k": int(generator.choice([0, 5, 50])),
            "min_p": float(generator.choice([0.0, 0.02])),
            "top_p": float(generator.choice([1.0, 0.5, 0.9])),
            "seed": seed,
        }
        for seed in range(num)
    ]
    rows = make_rows([[]] * num, params)
    logits = random_logits(7, num, vocab_size)
    result = coupled_verify(logits, rows)
    unit = torch.where(rows.temperature == 0, 1.0, rows.temperature)
    # Two logits move apart by twice the change of each; a third leaves room for that.
    reach = result.margins.clamp(max=3e-3) * unit / 3
    for _ in range(20):
        signs = torch.from_numpy(generator.choice([-1.0, 1.0], (num, vocab_size)))
        moved = (logits.double() + signs * reach[:, None]).float()
        assert torch.equal(coupled_verify(moved, rows).tokens, result.tokens)
    # And the margins are no idle bound: most are far above what rounding can do.
    assert (result.margins > 1e-3).float().mean() > 0.95


def test_an_empty_batch_is_no_work():
    result = coupled_verify(torch.zeros(0, 17), make_rows([], []))
    assert result.tokens.shape == (0,)
    assert result.num_sampled.shape == (0,)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", torch.tensor([-1.0, 1.0], dtype=torch.float64)),
        ("temperature", torch.tensor([torch.nan, 1.0], dtype=torch.float64)),
        ("temperature", torch.tensor([INF, 1.0], dtype=torch.float64)),
        ("top_k", torch.tensor([-1, 0])),
        ("top_p", torch.tensor([0.0, 1.0], dtype=torch.float64)),
        ("top_p", torch.tensor([1.5, 1.0], dtype=torch.float64)),
        ("min_p", torch.tensor([-0.1, 1.0], dtype=torch.float64)),
        ("position", torch.tensor([-1, 0])),
        ("position", torch.tensor([0])),
        ("seed", torch.tensor([0.0, 1.0])),
        ("offsets", torch.tensor([0, 2, 2])),
        ("offsets", torch.tensor([0, 1, 3])),
        ("draft_ids", torch.tensor([0])),
    ],
)
def test_bad_rows_are_refused_by_name(name, value):
    rows = make_rows([[], []], [{}, {}])
    with pytest.raises(ValueError, match=name):
        coupled_verify(torch.zeros(2, 17), replace(rows, **{name: value}))


def test_bad_logits_are_refused():
    rows = make_rows([[]], [{}])
    for logits in (torch.zeros(1, 17, dtype=torch.float64), torch.zeros(17), torch.zeros(1, 0)):
        with pytest.raises(ValueError, match="logits"):
            coupled_verify(logits, rows)
