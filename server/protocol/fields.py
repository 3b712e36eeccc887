"""Unsupported fields that would change the answer. A request that sets such a field is refused.

The wire models define the accepted fields. All other fields are ignored. FIELDS.md lists the fields
that clients send. A field that is null counts as missing."""

from dataclasses import dataclass
from typing import Any

from server.protocol.wire_errors import invalid


@dataclass(frozen=True, slots=True)
class RefusedField:
    """A field of a request's body that makes the server refuse the request."""

    name: str
    remedy: str
    harmless: tuple[Any, ...] = ()
    """The accepted values. If True is not among them, false, 0, "" and [] are accepted, too."""

    def is_harmless(self, value: Any) -> bool:
        wants_true = any(harmless is True for harmless in self.harmless)
        return value is None or value in self.harmless or not (value or wants_true)


RefusedFields = tuple[RefusedField, ...]


def refused(name: str, remedy: str, *harmless: Any) -> RefusedField:
    return RefusedField(name, remedy, harmless)


def overridden(fields: RefusedFields, *own: RefusedField) -> RefusedFields:
    """Return the ``own`` fields, and the ``fields`` that have other names."""
    names = {field.name for field in own}
    return (*own, *(field for field in fields if field.name not in names))


def check_refused(fields: RefusedFields, given: dict[str, Any]) -> None:
    """Raise ApiError (400) for the first refused field that is set in ``given``."""
    for field in fields:
        if not field.is_harmless(given.get(field.name)):
            raise invalid(f"{field.name} is not supported: {field.remedy}.", field.name)


SAMPLING_REFUSED = (
    refused("length_penalty", "there is no beam search", 1),
    refused("use_beam_search", "use n and temperature"),
    refused("best_of", "use n", 1),
    refused("bad_words", "use logit_bias"),
    refused("allowed_token_ids", "use structured_outputs"),
    refused("include_stop_str_in_output", "a stop string is never sent"),
    refused("skip_special_tokens", "special tokens are never sent", True),
    refused("truncate_prompt_tokens", "shorten the prompt", -1),
    refused("prompt_logprobs", "use echo and logprobs of /v1/completions"),
    refused("logprob_token_ids", "use top_logprobs"),
    refused("return_token_ids", "use logprobs, which have the bytes of tokens"),
    refused("return_tokens_as_token_ids", "use logprobs, which have the bytes of tokens"),
    refused("return_prompt_text", "use echo of /v1/completions"),
    refused("repetition_detection", "use repetition_penalty"),
    refused("typical_p", "use top_p or min_p", 1),
    refused("tfs_z", "use top_p or min_p", 1),
    refused("top_a", "use top_p or min_p"),
    refused("mirostat", "use temperature"),
    refused("dynatemp_range", "use temperature"),
    refused("xtc_probability", "use temperature"),
    refused("dry_multiplier", "use repetition_penalty"),
    refused("presence_context_size", "the penalty counts the whole answer"),
    refused("frequency_context_size", "the penalty counts the whole answer"),
    refused("repetition_context_size", "the penalty counts prompt and answer"),
    refused("n_predict", "use max_tokens", -1),
    refused("logits_processors", "use logit_bias"),
    refused("kv_transfer_params", "there is one server"),
    refused("vllm_xargs", "name the field itself"),
    refused("adapters", "the served model has none"),
)

STRUCTURE_REFUSED = (
    refused("guided_whitespace_pattern", "white space in JSON is up to the model"),
    refused("grammar", "use structured_outputs"),
    refused("json_schema", "use response_format"),
)

CHAT_REFUSED = (
    *SAMPLING_REFUSED,
    *STRUCTURE_REFUSED,
    refused("functions", "use tools"),
    refused("function_call", "use tool_choice", "none", "auto"),
    refused("audio", "this model writes text"),
    refused("modalities", "this model writes text", ["text"]),
    refused("web_search_options", "this server searches nothing"),
    refused("thinking", "use enable_thinking or thinking_token_budget"),
    refused("think", "use enable_thinking"),
    refused("echo", "use /v1/completions"),
    refused("add_special_tokens", "the template writes them"),
    refused("chat_template", "the template is the model's"),
    refused("documents", "put them into a message"),
    refused("role_mapping", "the template is the model's"),
)

EMBEDDING_REFUSED = (
    refused("truncate_prompt_tokens", "shorten the input", -1),
    refused("truncate", "shorten the input", "NONE"),
    refused("messages", "write the conversation into the input"),
    refused("instruction", "write it into the input"),
    refused("prompt_name", "write the instruction into the input"),
    refused("prompt", "write the instruction into the input"),
    refused("input_type", "write the instruction into the input"),
    refused("task", "write the instruction into the input"),
    refused("embed_dtype", "embeddings are float32", "float32"),
    refused("output_dtype", "embeddings are float32", "float", "float32"),
    refused("endianness", "base64 holds little-endian numbers", "little", "native"),
    refused("mm_processor_kwargs", "this model reads text"),
)

COMPLETION_REFUSED = (
    *SAMPLING_REFUSED,
    *(
        refused(name, "use /v1/chat/completions")
        for name in (
            *("response_format", "structured_outputs"),
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        )
    ),
    refused("suffix", "write the model's own tokens for it into the prompt"),
    refused("add_special_tokens", "write them into the prompt"),
    refused("prompt_embeds", "send text or token ids"),
)

TOKENIZE_REFUSED = (
    refused("add_special", "use add_special_tokens"),
    refused("parse_special", "special tokens are recognised in a text, and not in messages", True),
    refused("with_pieces", "use return_token_strs"),
    refused("chat_template", "the template is the model's"),
    refused("mm_processor_kwargs", "this model reads text"),
)
