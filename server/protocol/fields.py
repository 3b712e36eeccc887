"""What becomes of every field that clients send: the rule, in one table.

Accepted fields are those of the wire models. A field that would change the answer and is not
supported is refused by name, unless its value says nothing. What cannot change the answer is
ignored, and so is what nobody has heard of. null always means: as if it were not there.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from server.protocol.wire_errors import invalid


class Rule(Enum):
    """What becomes of a field."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    IGNORED = "ignored"


@dataclass(frozen=True, slots=True)
class FieldRule:
    """The rule for one field of a request's body."""

    name: str
    rule: Rule
    note: str
    """Accepted: what it does here. Refused: what to do instead. Ignored: why that is no harm."""
    harmless: tuple[Any, ...] = ()
    """Values of a refused field that ask for what happens anyway. So does nothing (false, 0, an
    empty text or list), unless true does."""

    def says_nothing(self, value: Any) -> bool:
        wants_true = any(harmless is True for harmless in self.harmless)
        return value is None or value in self.harmless or not (value or wants_true)


def accepted(name: str, note: str) -> FieldRule:
    return FieldRule(name, Rule.ACCEPTED, note)


def refused(name: str, note: str, *harmless: Any) -> FieldRule:
    return FieldRule(name, Rule.REFUSED, note, harmless)


def ignored(name: str, note: str) -> FieldRule:
    return FieldRule(name, Rule.IGNORED, note)


def refuse_unsupported(rules: tuple[FieldRule, ...], given: dict[str, Any]) -> None:
    """Check the fields that no wire model has. Raises ApiError (400) that names the first one that
    is refused."""
    for field in rules:
        if field.rule is Rule.REFUSED and not field.says_nothing(given.get(field.name)):
            raise invalid(f"{field.name} is not supported: {field.note}.", field.name)


NO_USE = "it has no use here"
SPEED_ONLY = "it could change the speed, not the answer"
ACCOUNT = "there is no account or store that it could matter to"

MODEL = "id, alias, folder's name or path; any other is a 404; may be left out"

SAMPLING_FIELDS = (
    accepted("model", MODEL),
    accepted("stream", "server-sent events"),
    accepted("stream_options", "include_usage; all else in it is ignored"),
    accepted("max_tokens", "-1 and null: as many as fit; more than fit is cut"),
    accepted("temperature", "0 to 2; 0 is greedy"),
    accepted("top_p", "0 to 1"),
    accepted("top_k", "0 and -1 switch it off"),
    accepted("min_p", "0 to 1"),
    accepted("presence_penalty", "-2 to 2, over all generated tokens"),
    accepted("frequency_penalty", "-2 to 2, over all generated tokens"),
    accepted("repetition_penalty", "0.01 to 10, over prompt and generated tokens"),
    accepted("logit_bias", "token id to -100 to 100"),
    accepted("seed", "the same one gives the same answer on one machine; -1 draws one"),
    accepted("stop", "a string, or a list; no part of one is sent"),
    accepted("stop_token_ids", "they end the answer as the model's own end does, and are not sent"),
    accepted("n", "answers side by side; answer i has the seed plus i"),
    accepted("min_tokens", "no token that ends the answer is chosen before"),
    accepted("ignore_eos", "the model's own end does not end the answer"),
    accepted("priority", "lower runs earlier"),
    accepted("cache_salt", "only requests with the same one share prefixes"),
    accepted("cache_report", "usage says why not more of the prompt came from the cache"),
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
    ignored("spaces_between_special_tokens", "special tokens are never sent"),
    ignored("truncation_side", "it says nothing without truncate_prompt_tokens"),
    ignored("num_draft_tokens", SPEED_ONLY),
    ignored("draft_model", SPEED_ONLY),
    ignored("cache_prompt", "prefixes are always kept"),
    ignored("id_slot", "there are no slots"),
    ignored("timings_per_token", "an addition to the answer that no SDK reads"),
    ignored("user", ACCOUNT),
    ignored("request_id", NO_USE),
    ignored("session_id", NO_USE),
)

GENERATING_FIELDS = (
    *(field for field in SAMPLING_FIELDS if field.name != "return_token_ids"),
    accepted("return_token_ids", "prompt_token_ids, and the token_ids of each choice"),
)

STRUCTURE_FIELDS = (
    accepted("response_format", "text, json_object (schema: as json_schema) or json_schema"),
    accepted("structured_outputs", "one of json, json_object, regex, choice, grammar"),
    accepted("guided_json", "a schema, as an object or as its text"),
    accepted("guided_regex", "a regular expression for the whole answer"),
    accepted("guided_choice", "a list of answers"),
    accepted("guided_grammar", "a grammar for the whole answer, Lark or GBNF"),
    refused("guided_whitespace_pattern", "white space in JSON is up to the model"),
    refused("grammar", "use structured_outputs"),
    refused("json_schema", "use response_format"),
    ignored("guided_decoding_backend", SPEED_ONLY),
)

CONTINUATION_FIELDS = (
    accepted("continue_final_message", "true: the last message, the assistant's, is gone on with"),
    accepted("add_generation_prompt", "false where a message is continued, and only there"),
)

THINKING_FIELDS = (
    accepted("reasoning", "effort, enabled, max_tokens; no summaries"),
    accepted(
        "reasoning_effort", "none: no thoughts; others as the template takes them, or as budgets"
    ),
    accepted("thinking_token_budget", "thoughts are ended after so many tokens; wins over effort"),
    accepted("thinking_budget", "the same"),
    accepted("enable_thinking", "the same as chat_template_kwargs.enable_thinking"),
    accepted("chat_template_kwargs", "what the model's template takes; anything else is refused"),
)

CHAT_FIELDS = (
    accepted(
        "messages",
        "text in all roles; developer is system, function is tool; prefix: true continues the last "
        "one, where it is the assistant's",
    ),
    accepted("max_completion_tokens", "wins over max_tokens"),
    *GENERATING_FIELDS,
    accepted("logprobs", "of every token, thoughts and calls included"),
    accepted("top_logprobs", "needs logprobs"),
    accepted("tools", "functions; custom tools are refused"),
    accepted("tool_choice", "none, auto, required, a function, allowed_tools"),
    accepted("parallel_tool_calls", "false: the answer ends with its first call"),
    *STRUCTURE_FIELDS,
    *THINKING_FIELDS,
    *CONTINUATION_FIELDS,
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
    ignored("verbosity", "a hint that the served models were not trained on"),
    ignored("prediction", SPEED_ONLY),
    ignored("service_tier", SPEED_ONLY),
    ignored("include_reasoning", "thoughts have fields of their own, which nobody has to read"),
    ignored("reasoning_format", "thoughts have fields of their own, which nobody has to read"),
    ignored("metadata", ACCOUNT),
    ignored("store", ACCOUNT),
    ignored("safety_identifier", ACCOUNT),
    ignored("moderation", ACCOUNT),
    ignored("prompt_cache_key", "prefixes are found by their tokens"),
    ignored("prompt_cache_options", "prefixes are found by their tokens"),
    ignored("prompt_cache_retention", "prefixes are kept while there is room"),
)

EMBEDDING_FIELDS = (
    accepted("input", "a text, a list of texts, token ids, or a list of those; none may be empty"),
    accepted("model", MODEL),
    accepted("encoding_format", "float, or base64 of little-endian float32"),
    accepted("dimensions", "the first so many numbers, at length 1 again; 1 to the model's size"),
    accepted("add_special_tokens", "false: texts get no end token; token ids never get one"),
    accepted("normalize", "true; false is refused"),
    accepted("priority", "lower runs earlier"),
    accepted("cache_salt", "only requests with the same one share prefixes"),
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
    ignored("user", ACCOUNT),
    ignored("request_id", NO_USE),
)

COMPLETION_FIELDS = (
    accepted("prompt", "a string, token ids, or a list of either; each prompt has n answers"),
    *(field for field in GENERATING_FIELDS if field.name != "best_of"),
    accepted("echo", "the prompt before each answer; then max_tokens may be 0"),
    accepted("logprobs", "0 to 5; with echo of the prompt's tokens, too"),
    accepted("best_of", "where it is n; another number is refused"),
    *(
        refused(field.name, "use /v1/chat/completions")
        for field in STRUCTURE_FIELDS
        if field.rule is Rule.ACCEPTED
    ),
    refused("suffix", "write the model's own tokens for it into the prompt"),
    refused("add_special_tokens", "write them into the prompt"),
    refused("prompt_embeds", "send text or token ids"),
)

TOKENIZE_FIELDS = (
    accepted("model", MODEL),
    accepted("prompt", "a text; its tokens are those that /v1/completions reads"),
    accepted("content", "the same"),
    accepted("messages", "as in /v1/chat/completions"),
    accepted("tools", "as in /v1/chat/completions"),
    accepted("tool_choice", "as in /v1/chat/completions"),
    *THINKING_FIELDS,
    accepted("continue_final_message", "as in /v1/chat/completions"),
    accepted("add_generation_prompt", "false: the messages alone, or with what is continued"),
    accepted(
        "add_special_tokens", "with those that the tokenizer puts around a text; not for messages"
    ),
    accepted("return_token_strs", "the text of each token as well"),
    accepted("cache_salt", "the chat's: whose thoughts are put back"),
    refused("add_special", "use add_special_tokens"),
    refused("parse_special", "special tokens are recognised in a text, and not in messages", True),
    refused("with_pieces", "use return_token_strs"),
    refused("chat_template", "the template is the model's"),
    refused("mm_processor_kwargs", "this model reads text"),
)

DETOKENIZE_FIELDS = (
    accepted("model", MODEL),
    accepted("tokens", "token ids; special ones are text here"),
)
