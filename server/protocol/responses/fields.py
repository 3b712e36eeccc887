"""What becomes of every field of /v1/responses."""

from server.protocol.fields import (
    ACCOUNT,
    CHAT_FIELDS,
    NO_USE,
    FieldRule,
    accepted,
    ignored,
    refused,
)

OWN_FIELDS = (
    accepted(
        "input",
        "text or items; items of one turn are one turn; prefix: true on the last one, the "
        "assistant's, has it continued, else an answer is a new turn",
    ),
    accepted("instructions", "said before the input; not taken over by the next response"),
    accepted("previous_response_id", "of the same API key, while it is stored"),
    accepted("store", "false: it cannot be asked for, or continued by its id"),
    accepted("metadata", "strings by their names; repeated in the response"),
    accepted("include", "log-probabilities and reasoning.encrypted_content; others say nothing"),
    accepted("max_output_tokens", "-1 and null: as many as fit; more than fit is cut"),
    accepted("max_tokens", "the same, where max_output_tokens says nothing"),
    accepted("stream_options", "what is in it is ignored; usage is always there"),
    accepted("n", "1"),
    accepted("top_logprobs", "of what is said, not of thoughts and calls"),
    accepted("tools", "functions, also those of namespaces; other types are left out"),
    accepted("tool_choice", "none, auto, required, a function, a namespace, allowed_tools"),
    accepted("parallel_tool_calls", "false: the answer ends with its first call"),
    accepted("reasoning", "effort; no summaries; other contexts and modes are refused"),
    accepted("text", "format: text, json_object or json_schema; verbosity is ignored"),
    accepted("reasoning_effort", "where reasoning.effort says nothing"),
    refused("messages", "use input"),
    refused("max_completion_tokens", "use max_output_tokens"),
    refused("logprobs", "use include: message.output_text.logprobs"),
    refused("return_token_ids", "use /v1/chat/completions"),
    refused("best_of", "a response is one answer", 1),
    refused("use_beam_search", "a response is one answer"),
    refused("truncation", "shorten the input", "disabled"),
    refused("background", "the answer is made while the client waits"),
    refused("conversation", "use previous_response_id"),
    refused("prompt", "use instructions and input"),
    refused("context_management", "shorten the input"),
    ignored("max_tool_calls", "it bounds calls that a server makes, and this one makes none"),
    ignored("client_metadata", ACCOUNT),
    ignored("access_programs", ACCOUNT),
    ignored("image", NO_USE),
)
_OWN_NAMES = frozenset(field.name for field in OWN_FIELDS)
RESPONSES_FIELDS: tuple[FieldRule, ...] = (
    *OWN_FIELDS,
    *(field for field in CHAT_FIELDS if field.name not in _OWN_NAMES),
)
