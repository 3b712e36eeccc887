"""What was wrong once, and the tests that would have found it.

A test is named by its file below tests/ and its function, with the parameters in brackets where one
of them alone is meant. ``python -m tests.abuse --against CHECKOUT`` runs them all on another
checkout's product.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.abuse.tables import TESTS


@dataclass(frozen=True, slots=True)
class Defect:
    """What somebody saw, and its tests; or why it stays as it is."""

    what: str
    tests: tuple[str, ...] = ()
    stays: str = ""


ROUTES, TEXT = "server/routes/", "server/text/"
FORMS, GRAMMAR, BODIES = ROUTES + "test_forms.py::", TEXT + "grammar/", "abuse/test_bodies.py::"
CLI, HUB = "server/cli/test_commands.py::", "server/catalogue/test_hub.py::"
WHEELS, RELEASE = "install/test_wheels.py::", "install/test_release.py::"
LISTENER = "server/http/test_listener.py::"
NAMES, UNREAD = "server/cli/test_settings.py::", "abuse/test_refusals.py::"
HOLDS_UP = BODIES + "test_a_body_holds_up_nobody_and_takes_little_memory"

DEFECTS = {
    "api-1": Defect(
        "text that spells an added token cannot be forced: 500, or a cut answer that says stop",
        (
            FORMS + "test_an_answer_may_spell_an_added_token",
            FORMS + "test_a_call_may_spell_an_added_token",
        ),
    ),
    "api-2": Defect(
        "Claude Code does not see that its prompt is too long",
        (ROUTES + "test_messages.py::test_what_cannot_be_done_is_named",),
    ),
    "api-3": Defect(
        "fields are missing in the response object",
        (
            ROUTES
            + "test_responses.py::test_a_response_has_all_fields_that_open_responses_asks_for",
        ),
    ),
    "api-4": Defect(
        "an answer cannot be begun for the model, which is said in three ways",
        (
            ROUTES + "test_continued.py::"
            "test_an_answer_is_continued_with_the_same_tokens_everywhere_as_its_prompt_by_ids",
        ),
    ),
    "api-5": Defect(
        "cache_creation_input_tokens is always 0",
        (ROUTES + "test_messages.py::test_what_is_new_in_the_cache_is_counted_apart",),
    ),
    "api-6": Defect(
        "/v1/models never speaks Anthropic",
        (ROUTES + "test_models.py::test_anthropics_clients_are_shown_the_model_as_anthropic_does",),
    ),
    "api-7": Defect(
        "endpoints of OpenAI's that are missing are a wrong method",
        (
            "server/http/test_app.py::test_an_endpoint_of_openais_that_is_not_here_is_no_wrong_method",
            ROUTES + "test_responses.py::test_the_tokens_of_an_input_can_be_counted",
        ),
    ),
    "api-8a": Defect(
        "HEAD /v1/models is refused",
        (ROUTES + "test_models.py::test_who_only_wants_to_know_whether_it_is_there_is_told",),
    ),
    "api-8b": Defect(
        "a slash at the end is another path",
        ("server/http/guards/test_slashes.py::test_a_slash_at_the_end_of_a_path_is_no_other_path",),
    ),
    "api-8c": Defect(
        "a wrong key of logit_bias is not named",
        (ROUTES + "test_refusals.py::test_the_key_of_a_bias_that_is_wrong_is_said",),
    ),
    "api-8d": Defect(
        "a prompt of a wrong type is refused in three ways at once",
        (ROUTES + "test_refusals.py::test_a_prompt_that_is_none_is_refused_in_one_sentence",),
    ),
    "api-8e": Defect(
        "the document is silent on keys of stream_options that are ignored",
        (ROUTES + "test_refusals.py::test_options_of_a_stream_that_are_ignored_are_documented",),
    ),
    "api-8f": Defect(
        "extensions of browsers are refused, each until it is named",
        (
            "server/http/guards/test_origins.py::test_extensions_of_browsers_are_let_in_by_one_setting",
        ),
    ),
    "api-8g": Defect(
        "more than 4 stop strings are refused",
        stays="it is OpenAI's limit, and a setting: limits.max_stop_strings",
    ),
    "reliability-1": Defect(
        "a grammar of 40 KB stops the whole process",
        (
            HOLDS_UP + "[brackets]",
            HOLDS_UP + "[a quote that never closes]",
            HOLDS_UP + "[line breaks]",
            GRAMMAR + "test_text.py::test_reading_a_grammar_takes_no_longer_than_it_is_long",
        ),
    ),
    "reliability-2": Defect(
        "an invalid body stops the event loop, and takes memory for each value's depth",
        (HOLDS_UP + "[a deep invalid body]", HOLDS_UP + "[half a character]"),
    ),
    "reliability-3": Defect(
        "forms that were refused stay in memory",
        (
            BODIES + "test_forms_that_were_refused_leave_nothing_in_memory",
            GRAMMAR + "test_cache.py::test_grammars_count_until_nobody_has_them",
            GRAMMAR + "test_judge.py::test_memory_has_an_end_even_where_time_has_none",
        ),
    ),
    "reliability-4": Defect(
        "forms that take long hold up everybody's",
        (
            BODIES + "test_nobody_waits_for_other_peoples_forms",
            FORMS + "test_forms_that_wait_too_long_for_their_turn_are_told_to_come_back",
            GRAMMAR + "test_compiler.py::test_a_budget_of_thoughts_alone_needs_no_compiler",
        ),
    ),
    "reliability-5": Defect(
        "/tokenize takes any text",
        (
            HOLDS_UP + "[a long text to tokenize]",
            "server/test_limits.py::"
            "test_a_body_beyond_a_limit_is_refused_by_every_route[bytes-/tokenize]",
            "server/routes/test_json_response.py::test_others_run_while_an_answer_is_written",
        ),
    ),
    "reliability-6": Defect(
        "bodies of very many values stop the event loop",
        (
            HOLDS_UP + "[lists of ids]",
            HOLDS_UP + "[empty texts]",
            HOLDS_UP + "[items]",
            HOLDS_UP + "[empty parts]",
            HOLDS_UP + "[messages]",
            "server/test_limits.py::test_a_body_beyond_a_limit_is_refused_by_every_route",
        ),
    ),
    "reliability-7": Defect(
        "a form that cannot be followed is the server's fault",
        (
            FORMS + "test_a_form_that_cannot_be_followed_is_a_400_while_others_start_at_once",
            FORMS + "test_a_form_that_comes_to_its_limits_in_the_answer_is_the_clients_fault",
        ),
    ),
    "reliability-8": Defect(
        "costly masks of a step have no sum: everybody waits for all of them",
        (
            "engine/test_scheduler.py::"
            "test_who_rests_for_its_masks_is_planned_neither_as_a_token_nor_as_a_chunk",
            FORMS + "test_costly_masks_of_many_answers_are_not_all_made_in_the_same_step",
        ),
    ),
    "reliability-9": Defect(
        "who is still sending does not read that the body is too large",
        (UNREAD + "test_a_refusal_is_read_by_who_is_still_sending",),
    ),
    "reliability-10a": Defect(
        "the row of an id that is none is read from other memory",
        (
            "metal_ext/test_packed_linear.py::"
            "test_threat_20_the_row_of_an_id_that_is_none_is_not_a_number",
        ),
    ),
    "reliability-10b": Defect(
        "angles of any dimension",
        (
            "metal_ext/test_project_append.py::"
            "test_threat_20_frequencies_that_are_none_are_refused",
            "metal_ext/test_integers.py::"
            "test_threat_20_no_argument_ends_the_process_or_has_it_take_memory_without_end",
        ),
    ),
    "reliability-11a": Defect(
        "a limit on the size of files is said to be no memory",
        (CLI + "test_heaps_larger_than_files_may_be_are_refused_with_both_figures",),
    ),
    "reliability-11b": Defect(
        "a closed standard stream ends the process with a traceback",
        (
            CLI + "test_streams_that_are_closed_lead_to_nowhere",
            CLI + "test_a_process_needs_none_of_its_standard_streams",
            CLI + "test_what_serves_with_all_streams_closed_puts_nothing_in_their_place",
        ),
    ),
    "reliability-11c": Defect(
        "a working folder that is gone is a traceback",
        (
            CLI + "test_a_folder_that_is_gone_is_left",
            CLI + "test_a_process_may_begin_in_a_folder_that_is_gone",
        ),
    ),
    "reliability-11d": Defect(
        "limits of control groups of version 1 are not seen",
        (
            "engine/test_machine.py::test_a_container_of_the_old_version_has_its_limit_too",
            "engine/test_control_groups.py::test_limits_of_version_1_are_read",
        ),
    ),
    "reliability-11e": Defect(
        "few open files leave one connection",
        (
            "server/http/test_server.py::test_few_descriptors_leave_connections_a_share",
            "abuse/test_crowd.py::"
            "test_fault_24_a_system_with_few_descriptors_serves_some_and_says_how_many",
        ),
    ),
    "reliability-11f": Defect(
        "connections that ask for nothing keep everybody out",
        ("abuse/test_threats.py::test_threat_05_who_does_not_ask_keeps_nobody_out",),
    ),
    "reliability-11g": Defect(
        "/memory shows each key the others' requests",
        (ROUTES + "test_memory.py::test_of_several_keys_each_sees_its_own_requests_alone",),
    ),
    "reliability-11h": Defect(
        "a key with other white space around it is let in",
        (
            "server/http/guards/test_keys.py::"
            "test_a_key_comes_as_a_bearer_token_or_as_anthropics_clients_send_it",
        ),
    ),
    "reliability-12": Defect(
        "special tokens that users' texts spell are turns of a conversation",
        (ROUTES + "test_special_tokens.py::test_a_forged_turn_is_the_text_that_it_was_sent_in",),
    ),
    "use-1": Defect(
        "there is no licence, no list of changes and no release",
        (
            WHEELS + "test_a_wheel_with_one_thing_wrong_is_named_with_it",
            RELEASE + "test_the_changes_have_a_section_of_this_version",
            RELEASE + "test_an_archive_is_refused_for_what_it_lacks_and_for_what_is_too_much",
        ),
    ),
    "use-2": Defect(
        "a model is downloaded before it is looked at",
        (HUB + "test_a_model_that_cannot_be_served_is_refused_before_a_byte_of_its_weights",),
    ),
    "use-3": Defect(
        "a plan takes more of a Mac's memory than serving does",
        ("server/cli/plan/test_command.py::test_a_mac_is_planned_by_what_its_gpu_may_use",),
    ),
    "use-4": Defect(
        "the beginning of a text is taken for a size",
        (CLI + "test_no_door_takes_the_beginning_of_a_text_for_a_size",),
    ),
    "use-5": Defect(
        "an open page floods the log",
        (ROUTES + "test_page.py::test_a_page_that_is_open_leaves_no_line_in_the_log",),
    ),
    "use-6": Defect(
        "a prompt that its tools make too long does not say so",
        (ROUTES + "test_chat.py::test_a_prompt_that_is_too_long_for_its_tools_says_so",),
    ),
    "use-7": Defect(
        "the first minutes are silent",
        (
            "test_setup_progress.py::test_each_package_is_named_at_a_terminal_and_they_are_counted",
            "test_setup_progress.py::test_each_step_of_the_compiler_is_named_at_a_terminal",
        ),
    ),
    "use-8": Defect(
        "a misspelt variable of the environment is ignored",
        (NAMES + "test_a_misspelt_variable_ends_the_start_and_its_value_is_not_told",),
    ),
    "use-9": Defect(
        "names of models that are none are not told what to write",
        (HUB + "test_a_name_that_is_none_is_told_what_to_write_without_asking_the_hub",),
    ),
    "use-10": Defect(
        "a wheel has packages of common names, and neither settings nor a model",
        (
            WHEELS + "test_a_wheel_with_one_thing_wrong_is_named_with_it",
            "server/cli/test_neighbours.py::test_the_start_of_a_server_says_so",
        ),
    ),
    "use-11": Defect(
        "a server ends in silence, and with a traceback while it starts",
        (
            CLI + "test_a_server_that_nobody_asks_says_that_it_ends",
            CLI + "test_an_interrupt_while_it_starts_ends_it_without_a_traceback",
        ),
    ),
    "use-12": Defect(
        "there is neither --version nor -h, nor a command that lists, gets or ends models",
        (
            CLI + "test_the_version_is_the_packages",
            CLI + "test_every_flag_of_serve_is_in_the_help",
            "server/cli/models/test_listing.py::"
            "test_all_models_of_this_disk_are_listed_with_what_this_machine_does_with_them",
            "server/cli/models/test_pull.py::test_a_model_is_fetched_once_and_a_pin_is_kept",
            "server/cli/test_running.py::test_models_that_are_loaded_are_told_with_how_long_they_stay",
        ),
    ),
    "use-13": Defect(
        "a taken port is found when the model is loaded, and says nothing of who has it",
        (
            CLI + "test_a_port_that_is_taken_is_refused_in_one_sentence",
            LISTENER + "test_a_taken_port_is_found_before_the_model_is_read",
        ),
    ),
    "use-14": Defect(
        "a download has lines through its bars",
        (HUB + "test_a_download_is_one_bar_whose_total_is_right",),
    ),
    "use-15": Defect(
        "what is wrong with a chat template is said to nobody",
        (
            "server/cli/test_model_files.py::"
            "test_a_template_is_tried_at_start_and_what_is_wrong_with_it_is_said",
            ROUTES + "test_chat.py::"
            "test_the_reason_of_a_template_that_fails_is_in_the_log_and_nothing_of_the_messages",
        ),
    ),
    "use-16": Defect(
        "a model that can never fit is told to lower what does not help",
        (
            HUB + "test_a_model_that_cannot_be_served_is_refused_before_a_byte_of_its_weights",
            "engine/test_build.py::test_a_model_that_can_never_fit_is_refused_with_what_would",
        ),
    ),
    "use-17": Defect(
        "an unknown setting is refused in the words of a library",
        (NAMES + "test_an_unknown_setting_is_refused_with_the_nearest_one",),
    ),
    "use-18": Defect(
        "a pointer of Git LFS is a header of two million terabytes",
        (
            "engine/models/test_checkpoint.py::"
            "test_a_pointer_of_git_lfs_is_named_with_the_command_that_fetches_it",
        ),
    ),
    "use-19": Defect(
        "a request's line in the log is long and does not say how fast it was",
        ("server/cli/test_log.py::test_a_request_is_a_short_line_at_a_terminal",),
    ),
    "use-20": Defect(
        "the document has less white space than JSON may have",
        (GRAMMAR + "test_white_space.py::test_the_document_says_so",),
    ),
    "use-22": Defect(
        "a plan's pictures do not name the model",
        (
            "server/cli/plan/test_pictures.py::test_all_pictures_are_drawn_as_svg",
            "server/cli/plan/test_pictures.py::test_what_cannot_be_had_is_marked",
        ),
    ),
    "use-23": Defect(
        "the doctor ends with a line without a name",
        ("server/cli/doctor/test_text.py::test_the_reasons_of_a_choice_have_their_name",),
    ),
    "use-25": Defect(
        "a folder without a tokenizer is served, and every chat has no tokens",
        ("server/cli/test_model_files.py::test_a_folder_without_a_tokenizer_is_refused_at_start",),
    ),
    "reliability-13": Defect(
        "a hostile model on the disk stops the front for all models",
        (
            "server/catalogue/test_folder_reader.py::"
            "test_a_hostile_folder_is_judged_within_limits_and_once",
            "server/cli/test_serve_models.py::test_a_hostile_model_that_appears_holds_up_no_other",
        ),
    ),
    "use-24": Defect(
        "urllib does not read that a body is too large",
        (UNREAD + "test_a_refusal_is_read_by_who_is_still_sending[headers0-413-with_urllib]",),
    ),
}


def untested() -> list[str]:
    """Defects that nothing holds, and tests that are not there."""
    bare = [name for name, one in DEFECTS.items() if bool(one.tests) == bool(one.stays)]
    return bare + [test for one in DEFECTS.values() for test in one.tests if not _is_there(test)]


def _is_there(test: str) -> bool:
    file, _, name = test.partition("::")
    function = re.escape(name.partition("[")[0])
    path = TESTS / file
    return path.is_file() and bool(
        re.search(rf"^(async )?def {function}\(", path.read_text(), re.M)
    )


def described() -> Iterator[str]:
    """All defects with their tests, as lines."""
    for name, one in DEFECTS.items():
        yield f"defect {name}: {one.what}"
        yield from (f"    tests/{test}" for test in one.tests)
        if one.stays:
            yield f"    stays: {one.stays}"
