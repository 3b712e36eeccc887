"""What the whole answer must be, in every form that clients ask for it: wire -> neutral form."""

import json
from typing import Annotated, Any

from pydantic import Field

from server.protocol.common import ListOf, WireModel
from server.protocol.wire_errors import invalid, quoted
from server.text.conversation import OutputFormat
from server.text.json_object import MAX_VALUES, has_many_values

Schema = dict[str, Any] | bool
SchemaOrText = dict[str, Any] | bool | str
Answers = Annotated[ListOf[str], Field(min_length=1)]


class NamedSchema(WireModel):
    """A schema with its name, which no model sees."""

    schema_: Schema | None = Field(default=None, alias="schema")


class ResponseFormat(WireModel):
    """OpenAI's form. Schemas are always strict here."""

    type: str
    json_schema: NamedSchema | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    """Where some clients put it."""


class StructuredOutputs(WireModel):
    """The form of other local servers."""

    json_: SchemaOrText | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Answers | None = None
    grammar: str | None = None
    structural_tag: Any = None


class StructureFields(WireModel):
    """The fields of a request that say so."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: Answers | None = None
    guided_grammar: str | None = None

    def output_format(self) -> OutputFormat | None:
        """Return the form that the answer must have; None: any text. Raises ApiError, also where
        two forms are given."""
        found = [*self._response_format(), *self._structured_outputs()]
        if self.guided_json is not None:
            found.append(_json(self.guided_json, "guided_json"))
        if self.guided_regex is not None:
            found.append(OutputFormat("regex", self.guided_regex, "guided_regex"))
        if self.guided_choice is not None:
            found.append(OutputFormat("choice", self.guided_choice, "guided_choice"))
        if self.guided_grammar is not None:
            found.append(OutputFormat("grammar", self.guided_grammar, "guided_grammar"))
        if len(found) > 1:
            raise invalid(
                f"{found[0].param} and {found[1].param} both say what the answer must be.",
                found[1].param,
            )
        return found[0] if found else None

    def _response_format(self) -> list[OutputFormat]:
        response_format = self.response_format
        if response_format is None or response_format.type == "text":
            return []
        if response_format.type not in ("json_object", "json_schema"):
            raise invalid(
                f"response_format {quoted(response_format.type)} is not supported.",
                "response_format.type",
            )
        if (
            response_format.json_schema is not None
            and response_format.json_schema.schema_ is not None
        ):
            place = "response_format.json_schema.schema"
            return [OutputFormat("json_schema", response_format.json_schema.schema_, place)]
        if response_format.schema_ is not None:
            return [OutputFormat("json_schema", response_format.schema_, "response_format.schema")]
        return [OutputFormat("json_object")]

    def _structured_outputs(self) -> list[OutputFormat]:
        structured = self.structured_outputs
        if structured is None:
            return []
        place = "structured_outputs"
        if structured.structural_tag:
            raise invalid("structural_tag is not supported.", f"{place}.structural_tag")
        found = []
        if structured.json_ is not None:
            found.append(_json(structured.json_, f"{place}.json"))
        if structured.json_object:
            found.append(OutputFormat("json_object", None, f"{place}.json_object"))
        if structured.regex is not None:
            found.append(OutputFormat("regex", structured.regex, f"{place}.regex"))
        if structured.choice is not None:
            found.append(OutputFormat("choice", structured.choice, f"{place}.choice"))
        if structured.grammar is not None:
            found.append(OutputFormat("grammar", structured.grammar, f"{place}.grammar"))
        return found


def _json(schema: SchemaOrText, param: str) -> OutputFormat:
    """Return the form of a schema, which may come as its text. Raises ApiError for a text that is
    none."""
    if isinstance(schema, str):
        if has_many_values(schema):
            raise invalid(f"The text has more than {MAX_VALUES} values.", param)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise invalid("The text is no JSON.", param) from error
        if not isinstance(schema, dict | bool):
            raise invalid("The text is no schema.", param)
    return OutputFormat("json_schema", schema, param)
