"""Incremental text: whole characters, equal to decoding at once, cut at the stop string that ends first."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from specsplit.gateway.text.output import OutputText, StopMatcher
from specsplit.gateway.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
PROSE = "The quick brown fox naïvely says 你好, 世界 👩‍🚀🇫🇷 \N{REPLACEMENT CHARACTER}!\r\n\tend\x00"


def byte_tokenizer() -> Tokenizer:
    """One token per byte, some merges that begin or end inside characters, a special token, an added one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ã", "©"), ("©", "Ã"), ("ä", "½"), ("ł", "å"), ("Ġ", "T"), ("h", "e")]
    vocab = {token: index for index, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    backend.add_tokens(["<add>"])
    return Tokenizer(backend, digest="", template=None)


def fallback_tokenizer() -> Tokenizer:
    """As SentencePiece models have it: words with a marker for the space before them, bytes for the rest."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁cat", "s", "▁sat"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return Tokenizer(backend, digest="", template=None)


BYTES = byte_tokenizer()
FALLBACK = fallback_tokenizer()
NUM_BYTE_IDS = BYTES.vocab_size


def run(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[str, list[str], bool]:
    """The text, its pieces, and whether a stop string ended it."""
    output, pieces = OutputText(tokenizer, stop), []
    for id_ in ids:
        pieces.append(output.push(id_))
        if output.is_stopped:
            return "".join(pieces), pieces, True
    pieces.append(output.finish())
    return "".join(pieces), pieces, False


def assert_equals_full_decode(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Equal but for at most three trailing replacement characters, which may be a character cut short."""
    text, full = run(tokenizer, ids)[0], tokenizer.decode(ids)
    assert full.startswith(text)
    assert full[len(text) :].strip(REPLACEMENT) == ""
    assert len(full) - len(text) <= 3


def first_stop(text: str, stop: tuple[str, ...]) -> int | None:
    """Where the text is cut, by trying every end."""
    for end in range(1, len(text) + 1):
        matches = [string for string in stop if text[:end].endswith(string)]
        if matches:
            return end - max(map(len, matches))
    return None


def test_prose_is_said_character_by_character_as_soon_as_it_is_whole() -> None:
    ids = [BYTES.encode(char, add_special_tokens=False) for char in PROSE.replace(REPLACEMENT, "")]
    output = OutputText(BYTES, ())
    for char, char_ids in zip(PROSE.replace(REPLACEMENT, ""), ids, strict=True):
        assert "".join(output.push(id_) for id_ in char_ids) == char


def test_no_piece_is_half_a_character() -> None:
    text, pieces, _ = run(BYTES, list(BYTES.encode(PROSE.replace(REPLACEMENT, ""), add_special_tokens=False)))
    assert text == PROSE.replace(REPLACEMENT, "")
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_a_character_cut_by_the_end_is_dropped() -> None:
    ids = list(BYTES.encode("ok 👩", add_special_tokens=False))
    for num_missing in (1, 2, 3):
        assert run(BYTES, ids[:-num_missing])[0] == "ok "


def test_replacement_characters_of_the_model_pass_in_the_middle() -> None:
    invalid = BYTES.encode("ÿ", add_special_tokens=False)[0]  # a lead byte with no character after it
    a = BYTES.encode("a", add_special_tokens=False)[0]
    genuine = BYTES.encode(REPLACEMENT, add_special_tokens=False)
    assert run(BYTES, [a, invalid, a, *genuine, a])[0] == f"a{REPLACEMENT}a{REPLACEMENT}a"


def test_special_tokens_and_unknown_ids_are_left_out_even_inside_a_character() -> None:
    eos, added = NUM_BYTE_IDS - 2, NUM_BYTE_IDS - 1
    first, *rest = BYTES.encode("é!", add_special_tokens=False)
    assert run(BYTES, [eos, first, eos, NUM_BYTE_IDS + 7, *rest, eos, added])[0] == "é!<add>"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, NUM_BYTE_IDS + 3), max_size=60))
def test_any_byte_level_ids_equal_their_full_decode(ids: list[int]) -> None:
    assert_equals_full_decode(BYTES, ids)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="aé你👩 \ufffd", max_size=40), st.randoms(use_true_random=False))
def test_characters_split_anywhere_equal_their_full_decode(text: str, rng: random.Random) -> None:
    ids = [BYTES.encode(chr(0xE9), add_special_tokens=False)[0]] * rng.randrange(2)
    assert_equals_full_decode(BYTES, ids + list(BYTES.encode(text, add_special_tokens=False)))


@pytest.mark.parametrize("pattern", ["c3", "ff", "a9c3", "e4bd", "f09f98", "80", "c3a9c3"])
def test_endless_invalid_bytes_neither_pile_up_nor_wait_for_ever(pattern: str) -> None:
    table = {bytes_: id_ for id_ in range(NUM_BYTE_IDS) if len(bytes_ := BYTES.token_bytes(id_)) <= 2}
    data = bytes.fromhex(pattern) * 200
    assert_equals_full_decode(BYTES, [table[bytes([byte])] for byte in data])
    if len(pattern) == 4 and bytes.fromhex(pattern) in table:  # the same as two-byte tokens
        assert_equals_full_decode(BYTES, [table[bytes.fromhex(pattern)]] * 200)
    output, said, ids = OutputText(BYTES, ()), "", []
    for byte in data:
        ids.append(table[bytes([byte])])
        said += output.push(ids[-1])
        assert len(BYTES.decode(ids)) - len(said) <= 3
        assert len(output._decoder._ids) < 24


def test_two_byte_tokens_that_all_begin_inside_a_character() -> None:
    crossing = next(id_ for id_ in range(NUM_BYTE_IDS) if BYTES.token_bytes(id_) == b"\xa9\xc3")
    lead = next(id_ for id_ in range(NUM_BYTE_IDS) if BYTES.token_bytes(id_) == b"\xc3")
    assert run(BYTES, [lead, *[crossing] * 100])[0] == "é" * 100
    assert run(BYTES, [crossing] * 100)[0] == REPLACEMENT + "é" * 99


def test_spaces_between_words_of_a_sentencepiece_vocabulary() -> None:
    the, cat, s, sat = (FALLBACK._backend.token_to_id(piece) for piece in ("▁the", "▁cat", "s", "▁sat"))
    ids = [the, cat, s, sat] * 20
    text, pieces, _ = run(FALLBACK, ids)
    assert text == FALLBACK.decode(ids)
    assert pieces[:5] == ["the", " cat", "s", " sat", " the"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["the", "é", "你", "👩", "s", "▁"]), max_size=30))
def test_byte_tokens_of_a_sentencepiece_vocabulary(words: list[str]) -> None:
    ids: list[int] = []
    for word in words:
        id_ = FALLBACK._backend.token_to_id(word if word in ("s", "▁") else f"▁{word}")
        ids += [id_] if id_ is not None else [1 + byte for byte in word.encode()]
    assert run(FALLBACK, ids)[0] == FALLBACK.decode(ids)


@pytest.mark.parametrize("length", range(1, 40, 6))
def test_invalid_byte_tokens_do_not_spoil_what_follows(length: int) -> None:
    s = FALLBACK._backend.token_to_id("s")
    text = run(FALLBACK, [s, *[1 + 0xFF] * length, s, *(1 + byte for byte in "你".encode()), s])[0]
    assert text == "s" + REPLACEMENT * length + "s你s"


STOP_CASES = [
    ("hello world", ("world",), "hello "),
    ("hello worl", ("world",), "hello worl"),
    ("an island, alone", ("a", "is", ","), ""),
    ("then, is it", ("a", "is", ","), "then"),
    ("xis, a", ("a", "is", ","), "x"),
    ("xis, a", (",", "a", "is"), "x"),
    ("abcd", ("bc", "abc"), ""),  # they end together: the longest
    ("abcd", ("abcd", "c"), "ab"),  # the one that ends first, though the other begins first
    ("aaaab", ("aab",), "aa"),
    ("abababac", ("ababac",), "ab"),
    ("stop", ("stop",), ""),
    ("né 👩‍🚀 fin", ("👩‍🚀",), "né "),
    ("a\n\nb", ("\n\n", "\n"), "a"),
]


@pytest.mark.parametrize(("text", "stop", "right"), STOP_CASES)
def test_the_stop_string_that_ends_first_cuts(text: str, stop: tuple[str, ...], right: str) -> None:
    got, _, is_stopped = run(BYTES, list(BYTES.encode(text, add_special_tokens=False)), stop)
    assert (got, is_stopped) == (right, first_stop(text, stop) is not None)
    for size in (1, 2, 3, len(text)):  # however the text arrives
        matcher, said = StopMatcher(stop), ""
        for start in range(0, len(text), size):
            piece, is_complete = matcher.push(text[start : start + size])
            said += piece
            if is_complete:
                break
        else:
            said += matcher.finish()
        assert said == right


@settings(max_examples=300, deadline=None)
@given(
    st.text(alphabet="abé", max_size=40),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple),
)
def test_any_stop_strings_cut_where_trying_every_end_does(text: str, stop: tuple[str, ...]) -> None:
    cut = first_stop(text, stop)
    got, pieces, is_stopped = run(BYTES, list(BYTES.encode(text, add_special_tokens=False)), stop)
    assert (got, is_stopped) == ((text, False) if cut is None else (text[:cut], True))
    said = ""
    for piece in pieces:  # only what may still become a stop string is held back
        said += piece
        assert text.startswith(said)


def test_only_a_possible_stop_string_is_held_back() -> None:
    output = OutputText(BYTES, ("END",))
    pieces = [output.push(id_) for id_ in BYTES.encode("a ENx EEN", add_special_tokens=False)]
    assert pieces == ["a", " ", "", "", "ENx", " ", "", "E", ""]
    assert output.finish() == "EN"


@pytest.mark.model
def test_random_ids_of_the_real_vocabulary_equal_their_full_decode(smollm2_dir: Path) -> None:
    tokenizer, rng = Tokenizer.load(smollm2_dir), random.Random(0)
    prose = list(tokenizer.encode(PROSE * 3, add_special_tokens=False))
    assert run(tokenizer, prose)[0].rstrip(REPLACEMENT) == (PROSE * 3).rstrip(REPLACEMENT)
    for _ in range(200):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(60))]
        assert_equals_full_decode(tokenizer, ids)
        bytes_only = [rng.randrange(17, 300) for _ in range(40)]  # single bytes and short pieces
        assert_equals_full_decode(tokenizer, bytes_only)
        position = rng.randrange(len(prose))
        assert_equals_full_decode(tokenizer, prose[position:] + bytes_only + prose[:position])
