"""Extraction of final answers from responses."""

import re

from fsdptrain.types import Prompt

OPEN, CLOSE = "<answer>", "</answer>"
THINK, THOUGHT = "<think>", "</think>"
BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")


def spoken(prompt: Prompt, response: str) -> str:
    """Return the response after its last thought, up to one that does not end. The prompt may have begun the first one.

    All rewards look for the answer in this text.
    """
    return (prompt.response_prefix + response).rpartition(THOUGHT)[2].partition(THINK)[0]


def extract_answer(text: str) -> str:
    """Return the last <answer>...</answer> of `spoken` text, else the last box, else all of it, stripped.

    A box is \\boxed{...} or \\fbox{...}.
    """
    found = find_answer(text)
    return text.strip() if found is None else found


def find_answer(text: str) -> str | None:
    """Extract the answer like `extract_answer`, but return None if none is marked. Unclosed marks do not count.

    A box that is all of an answer in tags is a mark too.
    """
    start = text.rfind(OPEN, 0, max(0, text.rfind(CLOSE)))
    if start >= 0:
        answer = text[start + len(OPEN) : text.find(CLOSE, start)].strip()
        box = BOXED.match(answer)
        content = _up_to_closing_brace(answer, box.end()) if box else None
        is_whole = box is not None and content is not None and box.end() + len(content) + 1 == len(answer)
        return content.strip() if content is not None and is_whole else answer
    boxes = (_up_to_closing_brace(text, box.end()) for box in reversed([*BOXED.finditer(text)]))
    return next((content.strip() for content in boxes if content is not None), None)


def _up_to_closing_brace(text: str, start: int) -> str | None:
    depth, at = 1, start
    while at < len(text):
        if text[at] == "\\":
            at += 1  # an escaped brace is part of the answer
        elif text[at] == "{":
            depth += 1
        elif text[at] == "}":
            depth -= 1
            if depth == 0:
                return text[start:at]
        at += 1
    return None
