"""What must hold between the rows of a sound store: one query a rule, listing what breaks it.

Each query drives from the side that is small in a healthy store, or along an index.  A row that it
gives is damage; `where` and `what` put it into words.  Nothing here writes.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Rule(NamedTuple):
    """One rule. The fields of a row are put into `where` and `what` by their position."""

    code: str
    where: str
    what: str
    sql: str


_SESSION = "ifnull((SELECT session_id FROM sessions WHERE session_no = {0}), {0})"

RULES: Final[tuple[Rule, ...]] = (
    # --- each step in exactly one place ---------------------------------------------------------
    Rule(
        "step-in-two-places",
        "step {0}",
        "it is committed to history, and the journal still has {1} row(s) of it",
        "SELECT step_id, count(*) FROM (SELECT id >> 32 AS step_id FROM stream_journal"
        " UNION ALL SELECT step_id FROM tool_calls UNION ALL SELECT step_id FROM tool_results"
        " UNION ALL SELECT step_id FROM tool_batches) JOIN step_metadata USING (step_id)"
        " WHERE state = 'committed' GROUP BY step_id",
    ),
    Rule(
        "step-in-two-places",
        "step {0}",
        "it is {1} in the journal, and history has {2} entry(s) of it",
        "SELECT m.step_id, m.state, count(*) FROM step_metadata m"
        " JOIN history_entries e ON e.stream_step_id = m.step_id"
        " WHERE m.state <> 'committed' AND m.session IS NOT NULL GROUP BY m.step_id",
    ),
    Rule(
        "two-writers",
        "session {0}",
        "{1} steps are unfinished in it, and a session has one writer",
        "SELECT session, count(*) FROM step_metadata WHERE state IN ('open', 'sealed')"
        " AND session IS NOT NULL GROUP BY session HAVING count(*) > 1",
    ),
    Rule(
        "doubled-entry",
        "step {0}",
        "part {1} of it stands {2} times in history",
        "SELECT stream_step_id, part, count(*) FROM history_entries"
        " WHERE stream_step_id IS NOT NULL GROUP BY stream_step_id, part HAVING count(*) > 1",
    ),
    # --- the journal ----------------------------------------------------------------------------
    Rule(
        "event-without-step",
        "step {0}",
        "{1} event(s) of it are in the journal, and there is no such step",
        "SELECT id >> 32, count(*) FROM stream_journal"
        " WHERE id >> 32 NOT IN (SELECT step_id FROM step_metadata) GROUP BY 1",
    ),
    Rule(
        "sealed-step-short",
        "step {0}",
        "it was sealed with {1} event(s), and {2} are there",
        "SELECT step_id, last_seq, found FROM (SELECT step_id, last_seq, (SELECT count(*)"
        " FROM stream_journal WHERE id > m.step_id << 32 AND id < m.step_id + 1 << 32) AS found"
        " FROM step_metadata m WHERE state = 'sealed') WHERE last_seq IS NOT found",
    ),
    Rule(
        "step-counter-behind",
        "step_counter",
        "it would give out step {0} next, and step {1} is on record",
        "SELECT next_step_id, newest FROM (SELECT (SELECT next_step_id FROM step_counter) AS"
        " next_step_id, max(ifnull((SELECT max(step_id) FROM step_metadata), 0),"
        " ifnull((SELECT max(id) >> 32 FROM stream_journal), 0)) AS newest)"
        " WHERE next_step_id IS NULL OR next_step_id <= newest OR next_step_id > 2147483647",
    ),
    Rule(
        "step-without-session",
        "step {0}",
        "it belongs to session {1}, and there is no such session",
        "SELECT step_id, session FROM step_metadata WHERE session IS NOT NULL"
        " AND session NOT IN (SELECT session_id FROM sessions)",
    ),
    Rule(
        "call-without-step",
        "step {0}",
        "{1} tool call(s) of it are on record, and there is no such step",
        "SELECT step_id, count(*) FROM tool_calls"
        " WHERE step_id NOT IN (SELECT step_id FROM step_metadata) GROUP BY step_id",
    ),
    Rule(
        "batch-without-step",
        "step {0}",
        "a batch of it is on record, and there is no such step",
        "SELECT step_id FROM tool_batches WHERE step_id NOT IN (SELECT step_id FROM step_metadata)",
    ),
    Rule(
        "result-without-call",
        "step {0}, call {1}",
        "a result is on record, and there is no such call",
        "SELECT r.step_id, r.position FROM tool_results r LEFT JOIN tool_calls c"
        " ON c.step_id = r.step_id AND c.position = r.position WHERE c.step_id IS NULL",
    ),
    Rule(
        "quarantined-step",
        "step {0} of session {1}",
        "recovery set it aside: {2}",
        "SELECT step_id, ifnull(session, '(none)'), ifnull(problem, 'no reason is on record')"
        " FROM step_metadata WHERE state = 'quarantined'",
    ),
    # --- history --------------------------------------------------------------------------------
    Rule(
        "entry-without-session",
        "session number {0}",
        "{1} entry(s) of it are in history, and there is no such session",
        "SELECT id >> 32, count(*) FROM history_entries"
        " WHERE id >> 32 NOT IN (SELECT session_no FROM sessions) GROUP BY 1",
    ),
    Rule(
        "wrong-link",
        "session {0}, entry {1}",
        "it is linked to step {2}, which belongs to session {3}",
        f"SELECT {_SESSION.format('e.id >> 32')}, e.id & 4294967295, m.step_id, m.session"
        " FROM history_entries e JOIN step_metadata m ON m.step_id = e.stream_step_id"
        " WHERE m.session IS NOT NULL AND m.session IS NOT"
        " (SELECT session_id FROM sessions WHERE session_no = e.id >> 32)",
    ),
    Rule(
        "wrong-link",
        "session {0}, entry {1}",
        "it is linked to step {2}, and an entry before it to the later step {3}",
        f"SELECT {_SESSION.format('number')}, entry, step_id, before FROM (SELECT e.id >> 32 AS"
        " number, e.id & 4294967295 AS entry, m.step_id, max(m.step_id) OVER (PARTITION BY"
        " e.id >> 32 ORDER BY e.id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before"
        " FROM history_entries e JOIN step_metadata m ON m.step_id = e.stream_step_id"
        " WHERE m.session IS NOT NULL) WHERE step_id < before",
    ),
    Rule(
        "wrong-link",
        "session {0}, entry {1}",
        "it holds the results of step {2}, and what that step said is not there",
        f"SELECT {_SESSION.format('e.id >> 32')}, e.id & 4294967295, m.step_id"
        " FROM history_entries e JOIN step_metadata m ON m.step_id = e.stream_step_id"
        " WHERE m.session IS NOT NULL AND e.part <> 0 AND NOT EXISTS (SELECT 1 FROM"
        " history_entries f WHERE f.stream_step_id = e.stream_step_id AND f.part = 0)",
    ),
    Rule(
        "step-and-entry-differ",
        "step {0}",
        "its row says {1}, {2}, {3}, and its entry says {4}, {5}, {6}",
        "SELECT m.step_id, m.status, m.stop_reason, m.model_name, e.status, e.stop_reason,"
        " e.model_name FROM history_entries e JOIN step_metadata m ON m.step_id = e.stream_step_id"
        " WHERE m.session IS NOT NULL AND m.state = 'committed' AND e.part = 0 AND (m.status IS"
        " NOT e.status OR m.stop_reason IS NOT e.stop_reason OR m.model_name IS NOT e.model_name"
        " OR (e.usage IS NOT NULL AND m.usage IS NOT e.usage))",
    ),
    # --- counters -------------------------------------------------------------------------------
    *(
        Rule(
            "counter-off",
            "session {0}",
            f"its counter of {what} says {{1}}, and there are {{2}}",
            f"SELECT session_id, {counter}, found FROM (SELECT session_id, {counter},"
            f" (SELECT {count}) AS found FROM sessions s) WHERE {counter} IS NOT found",
        )
        for counter, what, count in (
            (
                "entries",
                "entries",
                "count(*) FROM history_entries WHERE id >= s.session_no << 32"
                " AND id < s.session_no + 1 << 32",
            ),
            (
                "tokens",
                "tokens",
                "ifnull(sum(token_count), 0) FROM history_entries"
                " WHERE id >= s.session_no << 32 AND id < s.session_no + 1 << 32",
            ),
            (
                "summarized",
                "summarized entries",
                "count(summary_id) FROM history_entries"
                " WHERE id >= s.session_no << 32 AND id < s.session_no + 1 << 32",
            ),
            ("summaries", "summaries", "count(*) FROM summaries WHERE session_no = s.session_no"),
        )
    ),
    Rule(
        "last-status-off",
        "session {0}",
        "it says that its newest entry is {1}, and that one is {2}",
        "SELECT session_id, last_status, found FROM (SELECT session_id, last_status, (SELECT"
        " status FROM history_entries WHERE id >= s.session_no << 32 AND id < s.session_no + 1"
        " << 32 ORDER BY id DESC LIMIT 1) AS found FROM sessions s)"
        " WHERE found IS NOT NULL AND last_status IS NOT found",
    ),
    # --- summaries ------------------------------------------------------------------------------
    Rule(
        "summary-over-nothing",
        "session {0}, summary {1}",
        "it stands for the entries {2} up to {3}, and {4} of these are there",
        f"SELECT {_SESSION.format('session_no')}, summary_id, start_id, end_id - 1, found FROM"
        " (SELECT *, (SELECT count(*) FROM history_entries WHERE id >= (y.session_no << 32) +"
        " y.start_id AND id < (y.session_no << 32) + y.end_id) AS found FROM summaries y)"
        " WHERE found < end_id - start_id",
    ),
    Rule(
        "summary-link",
        "session {0}, entry {1}",
        "it is linked to summary {2}, which does not stand for it",
        f"SELECT {_SESSION.format('e.id >> 32')}, e.id & 4294967295, e.summary_id"
        " FROM history_entries e WHERE e.summary_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM"
        " summaries y WHERE y.session_no = e.id >> 32 AND y.summary_id = e.summary_id"
        " AND e.id & 4294967295 >= y.start_id AND e.id & 4294967295 < y.end_id)",
    ),
    Rule(
        "summary-link",
        "session {0}, summary {1}",
        "{3} of the {2} entries that it stands for are not linked to it",
        # A later summary may have taken over some, and a repair may have freed all.
        f"SELECT {_SESSION.format('session_no')}, summary_id, end_id - start_id, astray FROM"
        " (SELECT y.session_no, y.summary_id, y.start_id, y.end_id,"
        " count(*) FILTER (WHERE e.summary_id = y.summary_id) AS held,"
        " count(*) FILTER (WHERE ifnull(e.summary_id, -1) < y.summary_id) AS astray"
        " FROM summaries y JOIN history_entries e ON e.id >= (y.session_no << 32) + y.start_id"
        " AND e.id < (y.session_no << 32) + y.end_id GROUP BY 1, 2)"
        " WHERE held > 0 AND astray > 0",
    ),
)
