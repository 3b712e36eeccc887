"""Writes a ConstraintSpec for llguidance, as a list of grammars that refer to each other."""

import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from server.text.calls.tool_format import CALL_CLOSE, CALL_OPEN, ToolFormat
from server.text.conversation import Channel, OutputFormat, Tool
from server.text.grammar.constraint_spec import TOOLS_PARAM, ConstraintSpec
from server.text.grammar.grammar_errors import STRICT, GrammarError, Relaxation, errors_of
from server.text.grammar.schemas import MAX_PATTERNS, check_repeats, check_schema
from server.text.grammar.xml_values import JsonText, Parameter, lark_string, xml_parameters
from server.text.harmony import ANSWERER, FUNCTIONS


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """Facts about a tokenizer as plain values, to be sent to the worker process."""

    size: int
    """Number of the model's logits, which may exceed the number of tokens."""
    stop_ids: list[int]
    """Ids of tokens that end an answer."""
    tags: dict[str, list[int]]
    """``{tag around calls, or token of Harmony: its token ids}``."""
    names: dict[str, int]
    """``{name of an added token in grammars: id of the token}``."""


Grammar = dict[str, Any]
# White space between parts of JSON: nothing, one blank, or a line break with up to 24 blanks. It is
# limited because an uncertain model could write endless white space.
WHITE_SPACE = r"[\x20\x09]|\r?\n[\x20\x09]{0,24}"
# Letters of escapes allowed in JSON. "u" is missing: llguidance does not recognise keys with \u.
ESCAPES = 'nrbtf\\"'
JSON_OPTIONS = {"whitespace_pattern": WHITE_SPACE, "json_allowed_escapes": ESCAPES}
# Matches attributes of rules that llguidance ignores, or that take back generated text.
REFUSED_ATTRIBUTES = re.compile(r"\[[^\[\]\n]*\b(temperature|max_tokens|stop)\b\s*=")
DEFINITION = re.compile(
    r"^[ \t]*[?!]?[A-Za-z_][\w-]*(?:\[[^\]\n]*\])?[ \t]*(?::|::=)", re.MULTILINE
)
# Matches a literal in a grammar. A literal without an end takes the rest of its line.
LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\\n])*/?')
LITERAL_OR_NAME = re.compile(rf"{LITERAL.pattern}|<[^<>\s]+>")
# Blank lines are removed, because the GBNF converter scans them anew after each line break.
BLANK_LINES = re.compile(r"\n\s*\n")
LINE = "\n"
# A Lark terminal for any text without a tag that could end a value.
NO_TAG = r"NO_TAG: /(?s:.*)/ & ~/(?s:.*)<(\/?parameter|function=)(?s:.*)/"
# A Lark terminal for any text that is no call in Llama's format.
NO_CALL = r"NO_CALL: /\s*[^{\s](?s:.*)/ & ~/\s*<\|python_tag(?s:.*)/"
NAME = r"NAME: /[A-Za-z_][A-Za-z0-9_]*/"
# Maximum number of calls in an answer. A model that must call tools might never stop.
MAX_CALLS = 32
# Maximum number of rules. The time to convert GBNF grows with the square of this number.
MAX_RULES = 500
# ``{call format: (key of a call's arguments, text before and after a call)}``.
JSON_CALLS = {ToolFormat.HERMES: ("arguments", LINE), ToolFormat.LLAMA: ("parameters", "")}
ANY_OBJECT = {"type": "object"}
# A Lark terminal for any text between added tokens.
TEXT = "TEXT: /(?s:.*)/"


def grammar_text(
    spec: ConstraintSpec, facts: TokenizerFacts, relaxation: Relaxation = STRICT
) -> str:
    """Write the grammar of an answer's content, or of one optional call. Raises GrammarError."""
    grammar = CallGrammar(facts.tags)
    ways = []
    if spec.output is not None and not spec.must_call:
        relaxed = replace(relaxation, strict=spec.output.strict)
        with errors_of(spec.output.param):
            ways.append(grammar.add_part("answer", output_grammar(spec.output, facts, relaxed)))
    if spec.tools:
        with errors_of(TOOLS_PARAM):
            relaxed_tools = [(tool, replace(relaxation, strict=tool.strict)) for tool in spec.tools]
            tools = {
                tool.name: (_arguments(tool, spec.must_call, relaxed), relaxed)
                for tool, relaxed in relaxed_tools
            }
            grammar.add_calls(tools, spec.tool_format, spec.is_lazy)
    if spec.tool_format is ToolFormat.HARMONY:
        return grammar.text(grammar.add_messages(ways, spec))
    if spec.tools:
        is_llama = spec.tool_format is ToolFormat.LLAMA
        if is_llama and not spec.must_call and spec.output is None:
            grammar.rules.append(NO_CALL)
            ways.append("NO_CALL")
        several = spec.parallel and not spec.is_lazy and not is_llama
        ways.append(f'call ("\\n" call){{0,{MAX_CALLS - 1}}}' if several else "call")
    return grammar.text(" | ".join(ways))


def output_grammar(output: OutputFormat, facts: TokenizerFacts, relaxation: Relaxation) -> Grammar:
    """Write the grammar of an answer without tool calls. Raises GrammarError."""
    value = output.value
    match output.kind:
        case "json_object":
            return _json(ANY_OBJECT)
        case "json_schema":
            return _json(check_schema(value, relaxation))
        case "regex":
            check_repeats(_text(value))
            if relaxation.probes:  # Messages about a schema's pattern count its own characters.
                check_schema({"type": "string", "pattern": value}, relaxation, "")
            (grammar,) = json.loads(LLMatcher.grammar_from_regex(value))["grammars"]
            return {"lark_grammar": grammar["lark_grammar"]}
        case "choice":
            if not isinstance(value, list) or not value:
                raise GrammarError("it has no choices")
            return {"lark_grammar": "start: " + " | ".join(lark_string(_text(v)) for v in value)}
        case _:
            return {"lark_grammar": _lark(_named(_text(value), facts.names))}


def _json(schema: dict[str, Any]) -> Grammar:
    return {"json_schema": schema | {"x-guidance": JSON_OPTIONS}}


def _text(value: Any) -> str:
    """Return ``value``. Raises GrammarError if it is no text, is empty, or cannot be encoded."""
    if not isinstance(value, str) or not value:
        raise GrammarError("it must be a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise GrammarError("it has halves of characters") from error
    return value


def _named(text: str, names: dict[str, int]) -> str:
    """Replace the names of added tokens in a grammar's text by the tokens' ids."""

    def numbered(name: re.Match[str]) -> str:
        token = names.get(name[0])
        return name[0] if token is None else f"<[{token}]>"

    return LITERAL_OR_NAME.sub(numbered, text)


def _lark(text: str) -> str:
    """Translate a grammar in Lark or GBNF to llguidance's Lark. Raises GrammarError."""
    if attribute := REFUSED_ATTRIBUTES.search(text):
        raise GrammarError(f"{attribute[1]} in a grammar is not supported")
    if LITERAL.sub("", text).count("&") > MAX_PATTERNS:
        raise GrammarError(f"& comes more than {MAX_PATTERNS} times in it")
    if len(DEFINITION.findall(text)) > MAX_RULES:
        raise GrammarError(f"it has more than {MAX_RULES} rules")
    check_repeats(text)
    try:
        lark: str = any_to_lark(BLANK_LINES.sub("\n", text))
    except RecursionError as error:
        raise GrammarError("it is nested too deeply") from error
    except Exception as error:
        # The converter raises errors of any kind, whose messages quote the grammar.
        raise GrammarError("it is neither Lark nor GBNF") from error
    return lark


# --- grammars of tool calls --------------------------------------------------------------------


@dataclass(slots=True)
class CallGrammar:
    """The rules of tool calls, and the grammars to which the rules refer."""

    tag_tokens: dict[str, list[int]]
    rules: list[str] = field(default_factory=list)
    parts: list[Grammar] = field(default_factory=list)

    def add_calls(
        self,
        tools: dict[str, tuple[dict[str, Any], Relaxation]],
        tool_format: ToolFormat,
        opened: bool,
    ) -> None:
        """Add the rule ``call`` for one call of any tool. ``tools`` is ``{name: (schema of the
        arguments, relaxation)}``. If ``opened``, the opening tag is already written. Raises
        GrammarError."""
        is_bare = tool_format in (ToolFormat.LLAMA, ToolFormat.HARMONY)
        before = "" if opened or is_bare else self._tag(CALL_OPEN)
        after = "" if is_bare else self._tag(CALL_CLOSE)
        calls = [f"call_{number}" for number in range(len(tools))]
        for rule, (name, (schema, relaxation)) in zip(calls, tools.items(), strict=True):
            if tool_format is ToolFormat.HARMONY:
                self._add_message(rule, name, schema)
            elif tool_format is ToolFormat.XML:
                self._add_xml(rule, name, xml_parameters(schema, relaxation, f"{name}#"))
            else:
                self._add_json(rule, name, schema, *JSON_CALLS[tool_format])
        self.rules.append(f"call: {before} ({' | '.join(calls)}) {after}")

    def add_part(self, name: str, grammar: Grammar) -> str:
        """Add a grammar and return the reference by which rules include it."""
        self.parts.append({"name": name, **grammar})
        return f"@{name}"

    def text(self, start: str) -> str:
        """Return the whole grammar as text. ``start`` is the body of the rule named start."""
        lark = "\n".join([f"start: {start}", *self.rules])
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self.parts]})

    def add_messages(self, contents: list[str], spec: ConstraintSpec) -> str:
        """Add the rules of Harmony's messages. ``contents`` are what the final message may consist
        of. Return the body of the rule named start."""
        if not contents and not spec.must_call:
            contents = ["TEXT"]
        channel, message = self._tag("<|channel|>"), self._tag("<|message|>")
        self.rules += [
            TEXT,
            f'other: {self._tag("<|end|>")} {self._tag("<|start|>")} "{ANSWERER}"',
            f'thought: {channel} "analysis" {message} TEXT other',
            f'preamble: {channel} "commentary" {message} TEXT other',
        ]
        last = ["call"] if spec.tools else []
        last += [f'{channel} "final" {message} ({each})' for each in contents]
        first = {
            Channel.CONTENT: " | ".join(contents),
            Channel.REASONING: "TEXT other before* last",
            None: "before* last",
        }
        self.rules += [
            f"before: thought{' | preamble' if spec.tools and not spec.must_call else ''}",
            f"last: {' | '.join(last)}",
        ]
        return first[spec.opened]

    def _tag(self, tag: str) -> str:
        """Return a tag for a rule, as one token if the tokenizer has a token for the tag."""
        ids = self.tag_tokens[tag]
        return f"<[{ids[0]}]>" if len(ids) == 1 else lark_string(tag)

    def _add_json(
        self, rule: str, name: str, schema: dict[str, Any], key: str, around: str
    ) -> None:
        quoted = json.dumps(name, ensure_ascii=False)
        head = lark_string(f'{around}{{"name": {quoted}, "{key}": ')
        arguments = self.add_part(f"{rule}_arguments", _json(schema))
        self.rules.append(f"{rule}: {head} {arguments} {lark_string('}' + around)}")

    def _add_message(self, rule: str, name: str, schema: dict[str, Any]) -> None:
        """Add a call in Harmony. Its recipient is in the role's part or the channel's part of the
        header. gpt-oss writes the first, and its chat template writes the second."""
        channel, message = self._tag("<|channel|>"), self._tag("<|message|>")
        recipient = lark_string(f" to={FUNCTIONS}{name}")
        kind = f'" "? ({self._tag("<|constrain|>")}? "json")?'
        heads = f'{channel} "commentary" {recipient} | {recipient} {channel} "commentary"'
        arguments = self.add_part(f"{rule}_arguments", _json(schema))
        self.rules.append(f"{rule}: ({heads}) {kind} {message} {arguments}")

    def _add_xml(self, rule: str, name: str, parameters: list[Parameter]) -> None:
        parts = [lark_string(f"{LINE}<function={name}>{LINE}")]
        for number, parameter in enumerate(parameters):
            parts.append(self._add_parameter(f"{rule}_{number}", parameter))
        parts.append(lark_string(f"</function>{LINE}"))
        self.rules.append(f"{rule}: {' '.join(parts)}")

    def _add_parameter(self, rule: str, parameter: Parameter) -> str:
        """Add a parameter's rule. Return the rule's name, with "?" if optional, "*" if repeated."""
        if NO_TAG not in self.rules:
            self.rules += [NO_TAG, NAME]
        close = lark_string(f"{LINE}</parameter>{LINE}")
        values = []
        for number, form in enumerate(parameter.values):
            part = f"{rule}_{number}"
            if isinstance(form, JsonText):
                values.append(f"{self.add_part(part, _json(form.schema))} {close}")
            else:
                # A string's terminal includes the closing tag, so the string can end only there.
                values.append(part.upper())
                terms = " & ".join([*form.terms, "NO_TAG"])
                self.rules += [f"{part.upper()}_TEXT: {terms}"]
                self.rules += [f"{part.upper()}: {part.upper()}_TEXT {close}"]
        name = "NAME" if parameter.name is None else lark_string(parameter.name)
        head = f'"<parameter=" {name} {lark_string(">" + LINE)}'
        self.rules.append(f"{rule}: {head} ({' | '.join(values)})")
        return f"{rule}{parameter.times}"


def _arguments(tool: Tool, enforced: bool, relaxation: Relaxation) -> dict[str, Any]:
    """Return the schema of a tool's arguments, or ANY_OBJECT if it need not be enforced."""
    if tool.parameters is None or not (enforced or tool.strict):
        return ANY_OBJECT
    schema = check_schema(tool.parameters, relaxation, f"{tool.name}#")
    if not {"type", "$ref", "allOf", "anyOf", "oneOf", "enum", "const"} & set(schema):
        schema = {**ANY_OBJECT, **schema}
    return schema
