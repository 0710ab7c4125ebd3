"""What is side traffic, and above all what is not: people ask for titles and summaries, too."""

import time

import pytest
from live_traffic import assistant, user

from trl_openclaw.live.side_traffic import automatic, side_reason


def system(text):
    return {"role": "system", "content": text}


RESUMED = (
    "[TASK RESUMPTION] This task was interrupted 5 minutes ago. It may or may not be complete, so please reassess the "
    "task context. Be aware that the project state may have changed since then. If the task has not been completed, "
    "retry the last step before interruption and proceed with completing the task."
)
TALK = [user("How do I keep herbs fresh?"), assistant("In water.")]


@pytest.mark.parametrize(
    ("reason", "messages"),
    [
        ("title", [system("You are a title generator. You output ONLY a thread title."), *TALK]),
        ("title", [*TALK, user("Please write a 5-10 word title for the following conversation:\n\nHerbs")]),
        ("title", [user("### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.")]),
        ("title", [user([{"type": "text", "text": "Generate a short title for this conversation"}])]),
        ("title", [system("You write concise titles. It generates short titles for conversations."), *TALK[:1]]),
        ("summary", [*TALK, user("Your task is to create a detailed summary of the conversation so far, paying ...")]),
        (
            "summary",
            [*TALK, user("CRITICAL: text only.\n\nYour task is to create a concise summary of this conversation")],
        ),
        ("summary", [system("You are a helpful AI assistant tasked with summarizing conversations."), *TALK[:1]]),
        ("summary", [*TALK, user("Provide a detailed prompt for continuing our conversation above.")]),
        ("summary", [*TALK, user("Generate a detailed summary of this conversation. Include:\n1. A brief overview")]),
        (
            "summary",
            [*TALK, user("Summarize the conversation so far, as described in the prompt instructions.")],
        ),
        ("summary", [user("Progressively summarize the lines of conversation provided, adding onto the summary")]),
        (
            "task",
            [
                user(
                    "### Task:\nSuggest 3 follow-up questions.\n### Chat History:\n<chat_history>USER: x</chat_history>"
                )
            ],
        ),
        ("task", [user("### Task:\nGenerate 1-3 tags." + "rule " * 2000 + "\n<chat_history>USER: x</chat_history>")]),
        ("ping", [*TALK, user("Read HEARTBEAT.md if it exists. If nothing needs attention, reply HEARTBEAT_OK.")]),
        ("ping", [user("Heartbeat check. If nothing needs attention, respond with exactly HEARTBEAT_OK.")]),
        ("ping", [user("[cron:4f1 morning] Look at the mail.")]),
        ("ping", [user("ping")]),
        ("resume", [*TALK, user("The session was resumed after an interruption. Continue where you left off.")]),
        ("resume", [*TALK, user("[System: this conversation has been restored]")]),
        ("notice", [*TALK, user("<system-reminder>\nThe date is new.\n</system-reminder>")]),
        ("notice", [*TALK, user("System: [10:00] The gateway was restarted.")]),
        ("notice", [*TALK, user("System: [10:00] Node connected.\nSystem (untrusted): [10:01] Exec failed.")]),
        ("notice", [*TALK, user("System: [10:00] Exec completed.\n\nAn async command you ran earlier has completed.")]),
        ("notice", [*TALK, user("<system-reminder>A</system-reminder>\n<system-reminder>B</system-reminder>")]),
        (
            "ping",
            [*TALK, user("System: [10:00] Milk.\n\nA scheduled reminder has been triggered. Its content is: Milk")],
        ),
        (
            "resume",
            [*TALK, user("This session is being continued from a previous conversation that ran out of context. A")],
        ),
        ("resume", [*TALK, user("[Request interrupted by user for tool use]")]),
        ("resume", [*TALK, user(RESUMED)]),
        ("resume", [*TALK, user(f"{RESUMED}\n<environment_details>\n# Visible files\na.py\n</environment_details>")]),
        ("resume", [*TALK, user([{"type": "text", "text": RESUMED}, {"type": "text", "text": "word " * 2000}])]),
        ("notice", [*TALK, user("<environment_details>\n# Visible files\na.py\n</environment_details>")]),
        ("tool error", [*TALK, {"role": "tool", "content": "[Tool execution was interrupted]"}]),
        ("tool error", [*TALK, {"role": "tool", "content": "missing tool result in history; synthetic error result"}]),
        (
            "tool error",
            [
                *TALK,
                {
                    "role": "tool",
                    "content": "[openclaw] missing tool result in session history; inserted synthetic error result for "
                    "transcript repair.",
                },
            ],
        ),
        (
            "resume",
            [
                *TALK,
                {"role": "tool", "content": "Tool call was aborted"},
                user("Session resumed: continue"),
                system("x"),
            ],
        ),
    ],
)
def test_what_clients_ask_on_their_own_account(reason, messages):
    assert side_reason(messages) == reason


@pytest.mark.parametrize(
    "messages",
    [
        TALK[:1],
        [],
        [system("You are a helpful assistant.")],
        [system("You are a helpful assistant who knows titles and summaries."), *TALK, user("Thanks!")],
        [*TALK, user("Write a title for my essay about herbs.")],
        [user("Generate a title for a chat application that I am building")],
        [*TALK, user("Summarize our conversation, please.")],
        [*TALK, user("Create a summary of the report above.")],
        [*TALK, user("Can you generate a summary of this conversation?")],
        [*TALK, user("Generate a detailed summary of this conversation.")],
        [*TALK, user("Generate a detailed summary of this conversation. Include: what I should buy.")],
        [*TALK, user("Summarize the conversation so far, as described in the handbook.")],
        [*TALK, user("[TASK RESUMPTION] is what I saw in the log. What does it mean?")],
        [*TALK, user(f"{RESUMED}\n\nNew instructions:\n<user_message>\nNo, that is wrong.\n</user_message>")],
        [*TALK, user(f"{RESUMED}\n\n<user_message>\n{'No, that is wrong. ' * 300}\n</user_message>\n{'path ' * 600}")],
        [*TALK, user(f"No, that is wrong: use tabs.\n{RESUMED}")],
        [*TALK, user("No, use tabs.\n<environment_details>\na.py\n</environment_details>")],
        [user("What does HEARTBEAT_OK mean in this log?")],
        [user("My heartbeat is irregular, what should I do?")],
        [user("Ping the server and tell me what you see.")],
        [user("Can you resume the session that was interrupted?")],
        [user("The session has expired, says the site. Why?")],
        [*TALK, user("<system-reminder>New date.</system-reminder>\nAnd how do I dry them?")],
        [*TALK, user("<system-reminder>New date.</system-reminder>"), user("And how do I dry them?")],
        [*TALK, user("And how do I dry them?"), user("<system-reminder>New date.</system-reminder>")],
        [*TALK, {"role": "tool", "content": "Error: file not found"}],
        [*TALK, {"role": "tool", "content": "ping"}],
        [*TALK, {"role": "tool", "content": "aborted: the tool call was cancelled by the tests, see above"}],
        [*TALK, user("### Task:\nRefactor this function.")],
        [*TALK, user("Generate a good title for the following thread on X")],
        [*TALK, user("Your task is to create a detailed summary of this paper.")],
        [*TALK, user("Read HEARTBEAT.md and tell me what is wrong with it.")],
        [*TALK, user("Why did you not reply HEARTBEAT_OK?")],
        [*TALK, user("Heartbeat monitor code is broken, fix it")],
        [*TALK, user("Scheduled task runner fails, why?")],
        [*TALK, user("This session was interrupted by my cat, sorry. No, that is wrong: use tabs.")],
        [*TALK, user("Your conversation was interrupted; the answer was wrong")],
        [*TALK, user("[Note: the session was restored]\nNo, that is wrong: use tabs.")],
        [*TALK, user("[Request interrupted by user]\nNo, use tabs.")],
        [*TALK, user("System: [10:00] Node connected.\n\nNo, use tabs.")],
        [*TALK, user("<system-reminder>A</system-reminder>\nUse tabs.\n<system-reminder>B</system-reminder>")],
        [*TALK, {"role": "tool", "content": "AssertionError: the synthetic result does not match"}],
        [*TALK, {"role": "tool", "content": "rows of synthetic results: 12"}],
        [*TALK, {"role": "tool", "content": "missing tool result file"}],
        [*TALK, {"role": "tool", "content": "Tool call aborted after 3 of 5 tests failed"}],
        [*TALK, user([{"type": "image_url", "image_url": {"url": "data:"}}])],
        [*TALK, user(None)],
    ],
)
def test_what_people_say_is_a_conversation(messages):
    assert side_reason(messages) is None


def test_the_header_is_believed():
    ping = [user("ping")]
    assert side_reason(ping, header="main") is None
    assert side_reason(ping, header=" Main ") is None
    assert side_reason(TALK, header="side") == "side"
    assert side_reason(TALK, header="Title") == "title"
    assert side_reason(ping, header=" ") == "ping"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_one_token_is_a_probe(name):
    assert side_reason(TALK, {name: 1}) == "probe"
    assert side_reason(TALK, {name: 2, "temperature": 1}) is None


def test_assistants_are_never_automatic():
    assert automatic(assistant("ping")) is None
    assert automatic({"content": "ping"}) is None
    assert automatic(user("ping")) == "ping"


def test_hostile_texts_take_no_longer_than_plain_ones():
    def seconds(text):
        started = time.process_time()
        for _ in range(20):
            side_reason([user(text)])
        return time.process_time() - started

    size = 100_000
    plain = max(seconds("herbs and water " * (size // 16)), 0.002)
    for hostile in (
        "### task:" * (size // 9),
        "generate " * (size // 9),
        "create a title " * (size // 15),
        "[[" * size,
        "system: [" * (size // 9),
        "system: [\n" * (size // 10) + "a",
        "<system-reminder>" * (size // 17),
        "[task resumption] this task was interrupted" + "<" * size + "</user_message>",
        "<system-reminder></system-reminder>\n" * (size // 36) + "a",
    ):
        assert seconds(hostile) < 20 * plain
