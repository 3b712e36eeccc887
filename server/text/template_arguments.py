"""Find the arguments that a chat template takes besides the conversation."""

from collections.abc import Iterable
from inspect import signature

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

# What transformers gives to every template, and the names that mean something to itself.
SUPPLIED = frozenset(
    {"messages", "raise_exception", "strftime_now"}
    | signature(PreTrainedTokenizerFast.apply_chat_template).parameters.keys()
    | signature(render_jinja_template).parameters.keys()
)


class Generation(Extension):
    """The tag that transformers adds: what is within is the assistant's."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parse what is within the tag, as if there were no tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_arguments(texts: Iterable[str], special_tokens: Iterable[str]) -> frozenset[str]:
    """Return the variables that templates look up before they set them, and that nobody here
    supplies. A template that cannot be parsed has none. special_tokens: the names by which
    templates get them."""
    environment = Environment(autoescape=True, extensions=["jinja2.ext.loopcontrols", Generation])
    found: set[str] = set()
    for text in texts:
        try:
            tree = environment.parse(text)
        except TemplateSyntaxError:
            continue
        found |= find_undeclared_variables(tree) & _looked_up(tree, set())
    return frozenset(found - environment.globals.keys() - SUPPLIED - set(special_tokens))


def _looked_up(node: nodes.Node, known: set[str]) -> set[str]:
    """Return the variables that a template looks up before it sets them. known: those that it has
    set; what it sets is added."""
    if isinstance(node, nodes.Name):
        if node.ctx == "load":
            return {node.name} - known
        known.add(node.name)
    if isinstance(node, nodes.Macro):
        known = known.copy()  # its parameters are its own
    parts = list(node.iter_child_nodes())
    if isinstance(node, nodes.Assign):
        parts.reverse()
    return set().union(*(_looked_up(part, known) for part in parts))
