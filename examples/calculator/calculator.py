"""A calculator tool: it answers `<tool>12 * (3 + 4)</tool>`, or a <tool_call>, with `84`."""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from examples.calculator.tool_calls import ToolCall, find_tool_calls
from fsdptrain.types import Prompt, Turn

MAX_CHARACTERS = 256  # of an expression
MAX_BITS = 512  # of a numerator or a denominator, in every step
ONLY = "only numbers, + - * / // % ** and brackets can be calculated"
SYSTEM_PROMPT = (
    "You have a calculator. Write <tool>expression</tool>, for example <tool>12 * (3 + 4)</tool>, and end your turn "
    "there: the result is your next message. "
)
ANSWER_PROMPT = (
    "Give the final answer, and nothing else, inside <answer></answer> tags, for example <answer>42</answer>."
)
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "The value of an arithmetic expression of numbers, + - * / // % ** and brackets.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "for example 12 * (3 + 4)"}},
            "required": ["expression"],
        },
    },
}

_TAGGED = re.compile(r"<tool>(.*?)</tool>", re.DOTALL)
_ARITHMETIC = re.compile(r"[0-9\s.+\-*/%()]*")  # Python's parser warns about some other texts
_SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-", "^": "**"})
_BINARY: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}


@dataclass(frozen=True)
class Calculator:
    """Answer each tool call of a response with its value. A response without a call ends the episode.

    It gives no reward: `--reward` scores the last response. With `native_tools` the chat template describes the tool
    (`tools=`) instead of the system prompt. Both forms of a call are always accepted.
    """

    native_tools: bool = False

    @property
    def system_prompt(self) -> str:
        return ANSWER_PROMPT if self.native_tools else SYSTEM_PROMPT + ANSWER_PROMPT

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        return (TOOL,) if self.native_tools else ()

    def reset(self, prompt: Prompt, seed: int) -> None:
        """Return no state."""

    def step(self, state: None, response: str) -> Turn:
        del state
        results = [answer(expression) for expression in _TAGGED.findall(response)]
        results += [_answer_call(call) for call in find_tool_calls(response)]
        return Turn([{"role": "tool", "content": "\n".join(results)}]) if results else Turn(done=True)


def answer(expression: str) -> str:
    """Return the value of `expression`, exact if it is an integer, or `error: ...` for the model."""
    try:
        return show(evaluate(expression))
    except ZeroDivisionError:
        return "error: division by zero"
    except ValueError as error:
        return f"error: {error}"


def evaluate(expression: str) -> Fraction:
    """Evaluate exactly, with bounds on every step and without `eval`. Raises ValueError except for arithmetic."""
    text = expression.strip().translate(_SIGNS)
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"an expression has at most {MAX_CHARACTERS} characters")
    if not _ARITHMETIC.fullmatch(text):
        raise ValueError(ONLY)
    try:
        return _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError) as error:  # the last two: nested brackets
        raise ValueError("this is no arithmetic expression") from error


def show(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def _answer_call(call: ToolCall | str) -> str:
    if isinstance(call, str):
        return call
    expression = call.arguments.get("expression")
    if call.name != "calculator" or not isinstance(expression, str):
        return 'error: there is one tool: {"name": "calculator", "arguments": {"expression": "12 * (3 + 4)"}}'
    return answer(expression)


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(Fraction(repr(node.value)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _BINARY:
            return _bounded(_BINARY[type(node.op)](left, right))
    raise ValueError(ONLY)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("an exponent must be whole")
    size = max(abs(base.numerator), base.denominator).bit_length()
    if size * abs(exponent) > 2 * MAX_BITS:  # check before computing
        raise ValueError("the number is too large")
    return _bounded(Fraction(base) ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator).bit_length() > MAX_BITS:
        raise ValueError("the number is too large")
    return value
