-- Rows are added and never changed; only deletion of a person's data removes any or says who else told the same, and
-- everything that hangs on a turn goes with it. `created` is the wall clock, which may jump: order is always that of the
-- integer keys.

CREATE TABLE IF NOT EXISTS turns (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    turn_id TEXT NOT NULL UNIQUE,
    user TEXT NOT NULL,
    session_id TEXT NOT NULL,
    parent TEXT,
    kind TEXT NOT NULL CHECK (kind IN ('main', 'side')),
    side_reason TEXT,
    finish_reason TEXT NOT NULL,
    model TEXT NOT NULL,
    model_version TEXT NOT NULL,
    held_out INTEGER NOT NULL,
    created REAL NOT NULL,
    history_hash BLOB NOT NULL,
    tail_hash BLOB NOT NULL,
    -- What is long stands last, so that reading the rest need not pass over it. Texts here are JSON.
    sampling TEXT NOT NULL,
    prompt_ids BLOB NOT NULL,  -- 32-bit integers
    completion_ids BLOB NOT NULL,
    logprobs BLOB NOT NULL,  -- 32-bit floats
    reply TEXT NOT NULL,
    tools TEXT,
    messages TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS turns_by_user ON turns (user);
CREATE INDEX IF NOT EXISTS turns_by_history ON turns (user, history_hash);
CREATE INDEX IF NOT EXISTS turns_by_tail ON turns (user, tail_hash);
CREATE INDEX IF NOT EXISTS turns_by_session ON turns (user, session_id);
CREATE INDEX IF NOT EXISTS turns_by_parent ON turns (parent);

-- By what replies are known again by themselves, where they are long enough.
CREATE TABLE IF NOT EXISTS replies (
    turn INTEGER PRIMARY KEY REFERENCES turns (number) ON DELETE CASCADE,
    user TEXT NOT NULL,
    hash BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS replies_by_hash ON replies (user, hash);
INSERT OR IGNORE INTO replies
SELECT number, user, hash FROM (SELECT number, user, reply_hashed(reply) AS hash FROM turns) WHERE hash IS NOT NULL;

CREATE TABLE IF NOT EXISTS next_states (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    turn INTEGER NOT NULL UNIQUE REFERENCES turns (number) ON DELETE CASCADE,
    hash BLOB NOT NULL,
    source TEXT NOT NULL,
    told_by TEXT,  -- the turn_id of the request it was found in
    created REAL NOT NULL,
    messages TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS next_states_by_teller ON next_states (told_by);

CREATE TABLE IF NOT EXISTS feedback (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    turn INTEGER NOT NULL REFERENCES turns (number) ON DELETE CASCADE,
    user TEXT NOT NULL,
    key TEXT NOT NULL,
    thumb INTEGER NOT NULL CHECK (thumb IN (-1, 0, 1)),
    correction TEXT,
    created REAL NOT NULL,
    UNIQUE (user, key)
);
CREATE INDEX IF NOT EXISTS feedback_by_turn ON feedback (turn);

CREATE TABLE IF NOT EXISTS verdicts (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    turn INTEGER NOT NULL REFERENCES turns (number) ON DELETE CASCADE,
    score INTEGER CHECK (score IN (-1, 0, 1)),
    outcome TEXT NOT NULL,
    source TEXT NOT NULL CHECK (source IN ('judge', 'feedback', 'edit')),
    created REAL NOT NULL,
    hints TEXT NOT NULL,
    votes TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS verdicts_by_turn ON verdicts (turn, source, number);

CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    batch_id TEXT NOT NULL UNIQUE,
    user TEXT NOT NULL,
    created REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS batches_by_user ON batches (user);

CREATE TABLE IF NOT EXISTS uses (
    turn INTEGER NOT NULL REFERENCES turns (number) ON DELETE CASCADE,
    batch_id TEXT NOT NULL REFERENCES batches (batch_id),
    PRIMARY KEY (turn, batch_id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS uses_by_batch ON uses (batch_id);

CREATE TABLE IF NOT EXISTS batch_ends (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    batch_id TEXT NOT NULL REFERENCES batches (batch_id),
    outcome TEXT NOT NULL CHECK (outcome IN ('trained', 'rejected', 'released')),
    version TEXT,
    created REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS batch_ends_by_batch ON batch_ends (batch_id, number);

CREATE TABLE IF NOT EXISTS expiries (
    turn INTEGER PRIMARY KEY REFERENCES turns (number) ON DELETE CASCADE,
    created REAL NOT NULL
);

-- What a learner found it cannot train, such as a prompt that its template renders to other ids.
CREATE TABLE IF NOT EXISTS set_aside (
    turn INTEGER PRIMARY KEY REFERENCES turns (number) ON DELETE CASCADE,
    reason TEXT NOT NULL,
    created REAL NOT NULL
);

CREATE TABLE IF NOT EXISTS token_scores (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    turn INTEGER NOT NULL REFERENCES turns (number) ON DELETE CASCADE,
    batch_id TEXT NOT NULL REFERENCES batches (batch_id),
    student BLOB NOT NULL,  -- 32-bit floats, one for each sampled token
    teacher BLOB NOT NULL,
    advantages BLOB NOT NULL,
    prefers TEXT,
    tokens TEXT,
    UNIQUE (turn, batch_id)
);

CREATE TABLE IF NOT EXISTS versions (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    user TEXT NOT NULL,
    version TEXT NOT NULL,
    parent TEXT NOT NULL,
    path TEXT NOT NULL,
    created REAL NOT NULL,
    UNIQUE (user, version)
);

CREATE TABLE IF NOT EXISTS version_events (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    user TEXT NOT NULL,
    version TEXT NOT NULL,
    event TEXT NOT NULL CHECK (event IN ('checked', 'published', 'rejected', 'rolled_back', 'load_failed')),
    detail TEXT NOT NULL,
    created REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS version_events_by_user ON version_events (user, event, number, version);
CREATE INDEX IF NOT EXISTS version_events_by_version ON version_events (user, version, event, number);

CREATE TABLE IF NOT EXISTS opt_outs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    user TEXT NOT NULL,
    opted_out INTEGER NOT NULL,
    created REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS opt_outs_by_user ON opt_outs (user, number);

-- Without any text. What was asked before a deletion and is answered after it is not recorded.
CREATE TABLE IF NOT EXISTS deletions (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    user TEXT NOT NULL,
    what TEXT NOT NULL,  -- 'user', 'session' or 'turn'
    id TEXT NOT NULL,  -- hashed: clients may call a session what they like
    turns INTEGER NOT NULL,
    created REAL NOT NULL
);
UPDATE deletions SET id = hashed(id) WHERE id NOT LIKE 'sha256:%';
CREATE INDEX IF NOT EXISTS deletions_by_user ON deletions (user, number);

-- One row: what tells this store from every other one.
CREATE TABLE IF NOT EXISTS identity (one INTEGER PRIMARY KEY CHECK (one = 1), id TEXT NOT NULL);
INSERT OR IGNORE INTO identity VALUES (1, lower(hex(randomblob(6))));

-- The batch that a turn is in. A released batch does not count, so there is one at most.
CREATE VIEW IF NOT EXISTS current_uses AS
SELECT u.turn, u.batch_id, coalesce(e.outcome, 'open') AS outcome, e.version
FROM uses u
LEFT JOIN batch_ends e ON e.number = (SELECT max(number) FROM batch_ends WHERE batch_id = u.batch_id)
WHERE e.outcome IS NULL OR e.outcome <> 'released';

-- The verdict that counts, for every turn; without a source where there is none. To be joined, never LEFT JOINed, and
-- without a WHERE of its own: SQLite would make the whole of it for each query.
DROP VIEW IF EXISTS current_verdicts;
CREATE VIEW current_verdicts AS
SELECT
    t.number AS turn,
    s.score,
    coalesce(s.outcome, 'unasked') AS outcome,
    coalesce(s.votes, '[]') AS votes,
    coalesce(h.hints, '[]') AS hints,
    coalesce(s.source, h.source) AS source,
    CASE WHEN h.hints <> '[]' THEN h.source END AS hint_source,
    coalesce(s.created, h.created) AS created
FROM turns t
LEFT JOIN verdicts s ON s.number = coalesce(
    (SELECT max(number) FROM verdicts WHERE turn = t.number AND source = 'feedback'),
    (SELECT max(number) FROM verdicts WHERE turn = t.number AND source = 'judge')
)
LEFT JOIN verdicts h ON h.number = coalesce(
    (SELECT max(number) FROM verdicts WHERE turn = t.number AND source = 'edit'),
    (
        -- a correction is withdrawn by later feedback without one
        SELECT number FROM verdicts WHERE hints <> '[]' AND number = (
            SELECT max(number) FROM verdicts WHERE turn = t.number AND source = 'feedback'
        )
    ),
    (SELECT max(number) FROM verdicts WHERE turn = t.number AND source = 'judge' AND hints <> '[]')
);

-- The publications that stand. One is undone when its version is rolled back afterwards, or cannot be loaded: then the one
-- before counts again. Those that are undone SQLite finds once in a query, and not once for each turn.
DROP VIEW IF EXISTS publications;
CREATE VIEW publications AS
SELECT number, user, version
FROM version_events
WHERE event = 'published' AND number NOT IN (
    SELECT p.number FROM version_events u CROSS JOIN version_events p
    ON p.user = u.user AND p.version = u.version AND p.event = 'published' AND p.number < u.number
    WHERE u.event IN ('rolled_back', 'load_failed')
);

-- Each subquery stands here once, since SQLite runs it as often as it is written down.
DROP VIEW IF EXISTS turn_states;
CREATE VIEW turn_states AS
SELECT
    t.number,
    t.user,
    CASE WHEN t.kind = 'side' THEN 'side' ELSE coalesce(
        (SELECT CASE c.outcome WHEN 'open' THEN 'claimed' ELSE c.outcome END FROM current_uses c WHERE c.turn = t.number),
        CASE
            WHEN (SELECT o.opted_out FROM opt_outs o WHERE o.user = t.user ORDER BY o.number DESC LIMIT 1) THEN 'opted_out'
            WHEN length(t.prompt_ids) = 0 OR length(t.completion_ids) = 0
                OR length(t.logprobs) <> length(t.completion_ids)
                OR t.finish_reason = 'disconnect'
                OR EXISTS (SELECT 1 FROM set_aside a WHERE a.turn = t.number) THEN 'unusable'
            WHEN t.held_out THEN 'held_out'
            WHEN EXISTS (SELECT 1 FROM expiries x WHERE x.turn = t.number) THEN 'expired'
            -- Most have a score, for which there is no need to look through the hints.
            WHEN (
                SELECT v.score FROM verdicts v WHERE v.number = coalesce(
                    (SELECT max(number) FROM verdicts WHERE turn = t.number AND source = 'feedback'),
                    (SELECT max(number) FROM verdicts WHERE turn = t.number AND source = 'judge')
                )
            ) IS NOT NULL THEN 'ready'
            WHEN EXISTS (SELECT 1 FROM verdicts v WHERE v.turn = t.number) THEN (
                SELECT CASE WHEN v.hints <> '[]' THEN 'ready' ELSE 'judged' END
                FROM current_verdicts v WHERE v.turn = t.number
            )
            WHEN EXISTS (SELECT 1 FROM next_states n WHERE n.turn = t.number) THEN 'answered'
            ELSE 'open'
        END
    ) END AS state,
    -- the event by which the version that sampled it was last published; 0 for the base model
    coalesce(
        (
            SELECT max(q.number) FROM version_events q
            WHERE q.user = t.user AND q.event = 'published' AND q.version = t.model_version
        ), 0
    ) AS published,
    -- how many versions were published since, for good
    (
        SELECT count(*) FROM publications p
        WHERE p.user = t.user AND p.number > coalesce(
            (
                SELECT max(q.number) FROM version_events q
                WHERE q.user = t.user AND q.event = 'published' AND q.version = t.model_version
            ), 0
        )
    ) AS lag
FROM turns t;
