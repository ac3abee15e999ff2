"""The file format: what is on disk, and how a file of an older format becomes one of this.

INVARIANT  A step stands in exactly one place: its events in `stream_journal` while it is
           unfinished, its entries in `history_entries` once it is settled.  One transaction
           moves it.

ON DISK (format 2: one SQLite file, WAL, pages of 1024 bytes)
    the write-ahead side (format 1)
        stream_journal   the one log of events; seq runs 1, 2, 3 ... within a step, without a gap
        step_metadata    one row a step, for ever: whose it is, its state, what became of it
        tool_calls, tool_results, tool_batches   what a sealed step asked for and what came back
        owners           who has the file open; a row whose byte lock is free is a dead owner
    the settled side (format 2)
        history_entries  one row a message; id runs 0, 1, 2 ... within a session
        summaries        what stands for a range of entries in a smaller window

An event is valid if and only if its seq is one more than that of the event before it and its crc
matches; nothing behind the first invalid event of a step is trusted.  An entry or a result is valid
if and only if its crc matches; a bad one says nothing about its neighbours.

A crash leaves a prefix of the transactions: SQLite drops the unfinished one, so opening needs no
repair.  What it may leave is an unfinished step of a dead owner; `recovery` settles it.

Keys are packed (`step << 32 | seq`, `session << 32 | entry`): one b-tree, one leaf page a write.
A format that was released is never edited: a new function is added to MIGRATIONS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import apsw

APPLICATION_ID: Final = 0x486F4C44  # "HoLD"
PAGE_BYTES: Final = 1024
SEQ_BITS: Final = 32
SEQ_MASK: Final = (1 << SEQ_BITS) - 1
STEP_ID_MAX: Final = (1 << (63 - SEQ_BITS)) - 1  # what the high half of a key can hold

JOURNAL_SIDE: Final = """
CREATE TABLE stream_journal (
    id         INTEGER PRIMARY KEY,  -- step_id << 32 | seq: one b-tree, and appends go to its end
    event_type TEXT NOT NULL,        -- text_delta, thinking_delta, signature, opaque, call,
                                     -- args_delta, done, error
    call       INTEGER,              -- position of the tool call that it belongs to, if any
    content    ANY NOT NULL,         -- as it was given; a BLOB only where UTF-8 cannot hold it
    crc        INTEGER NOT NULL,     -- crc32 of id, event_type, call and content
    step_id    INTEGER GENERATED ALWAYS AS (id >> 32) VIRTUAL,
    seq        INTEGER GENERATED ALWAYS AS (id & 4294967295) VIRTUAL
) STRICT;

CREATE TABLE step_counter (
    id           INTEGER PRIMARY KEY CHECK (id = 1),
    next_step_id INTEGER NOT NULL    -- only ever rises: no id is given out twice
) STRICT;
INSERT INTO step_counter VALUES (1, 1);

CREATE TABLE owners (
    owner_id  INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused; its lock in the lock file
    pid       INTEGER NOT NULL,      -- for messages only: the lock alone says who lives
    host      TEXT NOT NULL,
    boot      TEXT NOT NULL,
    pid_space TEXT NOT NULL,         -- pid namespace: in another one a pid means another process
    opened_us INTEGER NOT NULL       -- wall clock, for people
) STRICT;

CREATE TABLE sessions (
    session_no INTEGER PRIMARY KEY AUTOINCREMENT,  -- the high half of an entry's key
    session_id TEXT NOT NULL UNIQUE,
    title      TEXT,
    provider   TEXT,
    model      TEXT,
    metadata   TEXT NOT NULL,        -- JSON object
    created_us INTEGER NOT NULL,     -- wall clock, for people; never used for order
    updated_us INTEGER NOT NULL,
    changed    INTEGER NOT NULL,     -- rises with every change in the store: the order of a listing
    entries    INTEGER NOT NULL DEFAULT 0,  -- counters, so that listing counts nothing
    tokens     INTEGER NOT NULL DEFAULT 0,
    summarized INTEGER NOT NULL DEFAULT 0,  -- entries that a summary stands for
    summaries  INTEGER NOT NULL DEFAULT 0,
    last_status TEXT                 -- status of the newest entry
) STRICT;
CREATE INDEX sessions_by_change ON sessions (changed);

CREATE TABLE step_metadata (
    step_id     INTEGER PRIMARY KEY, -- unique and rising for the life of the file, never reused
    session     TEXT REFERENCES sessions (session_id) ON DELETE CASCADE,  -- NULL: has none
    kind        TEXT NOT NULL CHECK (kind IN ('step', 'batch')),  -- batch: of a ToolJournal alone
    owner       INTEGER NOT NULL,    -- who may write it; meaningless once it is settled
    model_name  TEXT,
    state       TEXT NOT NULL CHECK (state IN ('open', 'sealed', 'committed', 'quarantined')),
    nonce       TEXT NOT NULL,       -- random: operation ids stay unique when a file is copied
    begun_us    INTEGER NOT NULL,    -- wall clock, for people; never used for order
    last_seq    INTEGER,             -- set by sealing: a sealed step with fewer events is damaged
    status      TEXT CHECK (status IN ('complete', 'errored', 'interrupted')),  -- set by sealing
    stop_reason TEXT,
    usage       TEXT,                -- JSON, as the provider reported it
    attempts    INTEGER NOT NULL DEFAULT 0,  -- recoveries that claimed it
    problem     TEXT                 -- why it is quarantined; JSON: what an empty step left
) STRICT;
-- recovery finds the unfinished steps without looking at the finished ones
CREATE INDEX steps_unfinished ON step_metadata (step_id) WHERE state IN ('open', 'sealed');
-- the one writer of a session
CREATE UNIQUE INDEX one_step_a_session ON step_metadata (session)
    WHERE state IN ('open', 'sealed') AND session IS NOT NULL;
CREATE INDEX steps_by_session ON step_metadata (session);

CREATE TABLE tool_batches (
    step_id        INTEGER PRIMARY KEY REFERENCES step_metadata (step_id) ON DELETE CASCADE,
    assistant_text TEXT NOT NULL     -- what was said beside the calls, where no stream has it
) STRICT;

CREATE TABLE tool_calls (
    step_id    INTEGER NOT NULL REFERENCES step_metadata (step_id) ON DELETE CASCADE,
    position   INTEGER NOT NULL,     -- 0, 1, 2 ... as announced: the identity of a call
    call_id    TEXT NOT NULL,        -- the provider's label; may be reused in a later step
    name       TEXT NOT NULL,
    state      TEXT NOT NULL CHECK (state IN ('ready', 'dropped', 'started')),
                                     -- dropped: its arguments are no JSON object
    replay     TEXT CHECK (replay IN ('never', 'safe')),  -- in doubt, may it run again?
    started_us INTEGER,
    process_id INTEGER,              -- a child that runs the call
    process_started TEXT,            -- start time of that child: a reused pid does not match it
    PRIMARY KEY (step_id, position)
) STRICT, WITHOUT ROWID;

CREATE TABLE tool_results (
    step_id     INTEGER NOT NULL REFERENCES step_metadata (step_id) ON DELETE CASCADE,
    position    INTEGER NOT NULL,
    body        TEXT NOT NULL,       -- the tool_result block as JSON: an answered call has one
    crc         INTEGER NOT NULL,    -- crc32 of step_id, position and body
    answered_us INTEGER NOT NULL,
    PRIMARY KEY (step_id, position)
) STRICT, WITHOUT ROWID;

CREATE VIEW v_unfinished AS  -- steps that are in flight, or that a crash has left
SELECT s.step_id, s.session, s.state, s.owner, o.pid, o.host, s.model_name,
       (SELECT count(*) FROM stream_journal j
         WHERE j.id BETWEEN s.step_id << 32 AND (s.step_id << 32) + 4294967295) AS events,
       (SELECT group_concat(j.content, '') FROM stream_journal j
         WHERE j.id BETWEEN s.step_id << 32 AND (s.step_id << 32) + 4294967295
           AND j.event_type = 'text_delta') AS text
  FROM step_metadata s LEFT JOIN owners o ON o.owner_id = s.owner
 WHERE s.state IN ('open', 'sealed')
 ORDER BY s.step_id;
"""

HISTORY_SIDE: Final = """
CREATE TABLE history_entries (
    id             INTEGER PRIMARY KEY,  -- session_no << 32 | entry_id
    role           TEXT NOT NULL,
    body           TEXT NOT NULL,    -- the message as JSON, written once
    status         TEXT NOT NULL CHECK (status IN ('complete', 'errored', 'interrupted')),
    created_us     INTEGER NOT NULL, -- wall clock, for people; never used for order
    stream_step_id INTEGER,          -- the step this came from, if any
    part           INTEGER,          -- 0: what the assistant said; 1: what its tools answered
    model_name     TEXT,
    stop_reason    TEXT,
    usage          TEXT,             -- JSON, as the provider reported it
    metadata       TEXT NOT NULL,    -- JSON object: notes of recovery, for people
    crc            INTEGER NOT NULL, -- crc32 of all columns above
    token_count    INTEGER,          -- NULL: not counted yet; no part of the crc, like the next two
    counter        TEXT,             -- which counter it came from
    summary_id     INTEGER,          -- the newest summary that covers it
    session_no     INTEGER GENERATED ALWAYS AS (id >> 32) VIRTUAL,
    entry_id       INTEGER GENERATED ALWAYS AS (id & 4294967295) VIRTUAL
) STRICT;
-- a commit that is replayed cannot insert twice
CREATE UNIQUE INDEX one_place_a_step ON history_entries (stream_step_id, part)
    WHERE stream_step_id IS NOT NULL;
-- counts that are still to be filled in
CREATE INDEX entries_uncounted ON history_entries (id) WHERE token_count IS NULL;

CREATE TABLE summaries (
    session_no      INTEGER NOT NULL REFERENCES sessions (session_no) ON DELETE CASCADE,
    summary_id      INTEGER NOT NULL, -- 0, 1, 2 ... within a session
    start_id        INTEGER NOT NULL, -- covers [start_id, end_id)
    end_id          INTEGER NOT NULL,
    content         TEXT NOT NULL,
    token_count     INTEGER NOT NULL,
    original_tokens INTEGER NOT NULL,
    created_us      INTEGER NOT NULL,
    generated_by    TEXT NOT NULL,
    crc             INTEGER NOT NULL, -- crc32 of all columns above
    PRIMARY KEY (session_no, summary_id),
    CHECK (start_id < end_id)
) STRICT, WITHOUT ROWID;

CREATE VIEW v_sessions AS  -- the sessions, last changed first
SELECT session_id, title, provider, model, datetime(created_us / 1000000, 'unixepoch') AS created,
       datetime(updated_us / 1000000, 'unixepoch') AS updated, entries, tokens, last_status
  FROM sessions ORDER BY changed DESC;

CREATE VIEW v_messages AS  -- every message, in order, as JSON
SELECT s.session_id, e.entry_id, e.role, e.status, e.stream_step_id AS step_id, e.token_count,
       datetime(e.created_us / 1000000, 'unixepoch') AS created, e.body
  FROM history_entries e JOIN sessions s ON s.session_no = e.session_no
 ORDER BY e.id;
"""


def m001_the_write_ahead_side(db: apsw.Connection) -> None:
    """Format 1: the journal, its owners and the names of the sessions."""
    db.execute(JOURNAL_SIDE)


def m002_the_settled_side(db: apsw.Connection) -> None:
    """Format 2: history entries and summaries, in the same file so that settling is one commit."""
    db.execute(HISTORY_SIDE)


MIGRATIONS: Final[tuple[Callable[[apsw.Connection], None], ...]] = (
    m001_the_write_ahead_side,
    m002_the_settled_side,
)
FORMAT: Final = len(MIGRATIONS)


def migrate(db: apsw.Connection, version: int) -> None:
    """Bring a file of `version` to FORMAT; the caller holds the write transaction."""
    for step in MIGRATIONS[version:]:
        step(db)
    db.execute(f"PRAGMA user_version = {FORMAT}")
