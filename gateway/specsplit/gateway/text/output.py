"""The text of one growing output: whole characters only, cut at the first stop string. Knows no request.

Text is final when it is returned: it never changes afterwards, whatever tokens follow.
"""

from __future__ import annotations

from specsplit.gateway.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_UNFINISHED = 3  # bytes of a UTF-8 character that has not ended; each may show as one U+FFFD
_MIN_WINDOW = 4  # tokens decoded together; twice as many at most
_MIN_WINDOW_HELD = 12  # the same while text is held: three U+FFFD of three bytes each, and a cut character


class OutputText:
    """`push` each output token, then `finish` unless a stop string ended the output."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self.is_stopped = False
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = StopMatcher(stop) if stop else None

    def push(self, token_id: int, *, can_stop: bool = True) -> str:
        """The text that became final; it ends before the stop string that the token completed, if any.

        A stop string completed while `can_stop` is False (before `min_tokens`) is text like any other.
        """
        assert not self.is_stopped, "pushed past a stop string"
        text = self._decoder.push(token_id)
        if self._stops is None:
            return text
        text, self.is_stopped = self._stops.push(text, can_stop=can_stop)
        return text

    def finish(self) -> str:
        """Text held back as the possible beginning of a stop string; an unfinished character is dropped."""
        return self._stops.finish() if self._stops is not None else ""


class IncrementalDecoder:
    """Token ids to text, one at a time, equal to decoding all at once.

    A short window of the last tokens is decoded together, for a character may span tokens and some decoders
    look at a token's neighbours. Trailing replacement characters may be a character that has not ended yet,
    so up to three of them wait for the next token; they are dropped when there is none. A window that has
    grown long loses its older part. If the cut is inside a character, the window's text then begins with
    replacement characters for the rest of it, which was said already, and goes on as before.

    Vocabularies with byte tokens (`<0x0A>`) decode a run of them at once, so an invalid byte there spoils
    characters before it; those were returned already and stay.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the window
        self._done = ""  # the part of its text that was returned

    def push(self, token_id: int) -> str:
        if not self._tokenizer.is_text(token_id):
            return ""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        if not text.startswith(self._done):
            self._ids, self._done = [token_id], ""
            text = self._tokenizer.decode(self._ids)
        num_trailing = len(text) - len(text.rstrip(_REPLACEMENT))
        num_held = min(num_trailing, _MAX_UNFINISHED, len(text) - len(self._done))
        end = len(text) - num_held
        new, self._done = text[len(self._done) : end], text[:end]
        num_kept = _MIN_WINDOW_HELD if num_held else _MIN_WINDOW
        if len(self._ids) >= 2 * num_kept:
            new += self._shorten(text, num_held, num_kept)
        return new

    def _shorten(self, text: str, num_held: int, num_kept: int) -> str:
        """Keeps the last tokens of the window; returns what can wait no longer."""
        ids = self._ids[-num_kept:]
        tail = self._tokenizer.decode(ids)
        if text.endswith(tail.lstrip(_REPLACEMENT)) and len(tail) >= num_held:
            self._ids, self._done = ids, tail[: len(tail) - num_held]
            return ""
        self._ids, self._done = [], ""
        return text[len(text) - num_held :]


class StopMatcher:
    """Finds the stop string that ends first in a growing text; of those that end together, the longest.

    Knuth, Morris and Pratt's automaton for each string (Fast Pattern Matching in Strings, 1977): how much of
    it the text's end spells is also what must be held back. Constant time per character, whatever the text.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        assert stop
        assert all(stop)
        self._stop = stop
        self._fallbacks = [_fallbacks(string) for string in stop]
        self._num_matched = [0] * len(stop)
        self._held = ""

    def push(self, text: str, *, can_stop: bool = True) -> tuple[str, bool]:
        """Text that cannot belong to a stop string any more, and whether one is complete."""
        buffer = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            longest = self._advance(char)
            if longest and can_stop:
                self._held = ""
                return buffer[: end - longest], True
        keep = len(buffer) - max(self._num_matched)
        self._held = buffer[keep:]
        return buffer[:keep], False

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> int:
        """Length of the longest stop string that ends with `char`, 0 for none."""
        longest = 0
        for index, string in enumerate(self._stop):
            matched = self._num_matched[index]
            if matched == len(string):  # complete before it could stop the output
                matched = self._fallbacks[index][-1]
            while matched and string[matched] != char:
                matched = self._fallbacks[index][matched - 1]
            if string[matched] == char:
                matched += 1
            self._num_matched[index] = matched
            if matched == len(string):
                longest = max(longest, matched)
        return longest


def _fallbacks(string: str) -> list[int]:
    """For each prefix of `string`, the length of its longest proper prefix that is also its suffix."""
    lengths = [0]
    for char in string[1:]:
        matched = lengths[-1]
        while matched and string[matched] != char:
            matched = lengths[matched - 1]
        lengths.append(matched + (string[matched] == char))
    return lengths
