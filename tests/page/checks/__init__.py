"""What the page must do, in a real browser in front of real servers."""

from collections.abc import Callable

from tests.page.checks import chat, conversations, keys, look, memory, models, replicas, text, turns
from tests.page.visit import Browser


def all_checks() -> list[Callable[[Browser], None]]:
    return [
        chat.an_answer_is_shown_with_its_thoughts_and_its_figures,
        chat.an_answer_streams_and_stop_ends_its_request_on_the_server,
        chat.enter_sends_and_shift_enter_and_input_methods_do_not,
        chat.a_refusal_is_shown_as_a_sentence_and_the_question_is_kept,
        chat.a_full_server_says_when_to_try_again,
        chat.a_key_is_asked_for_and_kept_for_the_tab_alone,
        text.markdown_is_shown_whole_and_code_in_colours,
        text.what_a_model_writes_is_text_and_never_markup,
        text.hostile_text_is_inert,
        text.a_text_looks_the_same_written_bit_by_bit_and_at_once,
        text.long_and_crooked_texts_are_shown_while_nobody_waits,
        conversations.conversations_outlive_a_reload_and_are_renamed_and_deleted,
        conversations.a_message_is_edited_and_an_answer_regenerated,
        conversations.settings_belong_to_a_conversation_and_are_sent,
        conversations.conversations_leave_as_files_and_come_back,
        conversations.hostile_files_and_kept_conversations_are_inert,
        conversations.only_the_newest_are_kept,
        conversations.a_browser_that_keeps_nothing_says_so,
        keys.keys_stop_edit_and_open_what_they_say,
        models.a_model_is_chosen_and_its_memory_shown,
        turns.a_turn_says_why_it_was_slow_and_where_it_left_the_cache,
        turns.reasons_are_told_apart,
        memory.the_map_shows_sequences_that_share_a_prefix,
        memory.numbers_on_the_page_are_those_of_the_server,
        memory.curves_grow_while_the_page_is_seen_and_rest_while_it_is_not,
        memory.lists_and_numbers_are_read_right,
        memory.a_pool_of_many_blocks_is_drawn_while_nobody_waits,
        memory.states_are_shown_by_their_conversations,
        memory.a_server_that_is_gone_or_stuck_is_said_to_be,
        replicas.replicas_are_listed_where_there_is_a_cluster,
        replicas.the_list_of_replicas_is_accessible_and_fits,
        look.it_looks_right_in_dark_and_light_wide_and_narrow,
        look.axe_finds_nothing_in_dark_and_light_in_lists_and_dialogs,
    ]
