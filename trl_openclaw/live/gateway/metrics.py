"""What Prometheus can read of the gateway. Nothing here names a user or holds a text."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """Counters of one gateway, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Chat requests by the status that they were answered with", "status")
        self.seconds = self._histogram("request_seconds", "Seconds until a reply was complete")
        self.first_piece = self._histogram("first_piece_seconds", "Seconds until the engine's first piece of a reply")
        self.in_flight = self._gauge("in_flight", "Chat requests that are being answered")
        self.tokens = self._counter("tokens", "Tokens of prompts and replies", "of")
        self.disconnects = self._counter("disconnects", "Clients that went away before the end of their reply")
        self.engine_failures = self._counter("engine_failures", "Replies that the engine did not give, or cut", "kind")
        self.turns = self._counter("turns_recorded", "Turns written to the store", "kind")
        self.unusable = self._counter("turns_without_ids", "Turns whose ids cannot be trained, by the reason", "reason")
        self.store_failures = self._counter("store_failures", "Times that the store could not be written")
        self.turns_waiting = self._gauge("turns_waiting", "Turns kept in memory until the store can be written again")
        self.turns_lost = self._counter("turns_lost", "Turns that will never be in the store")
        self.turns_deleted = self._counter(
            "turns_deleted", "Turns not recorded because their user deleted something while they were answered"
        )
        self.next_states = self._counter("next_states", "Requests by what they are to the turn before", "as")
        self.swaps = self._counter("swaps", "Times that a user's version changed")
        self.load_failures = self._counter("load_failures", "Versions that could not be loaded")
        self.judged = self._counter("judged", "Verdicts by what the votes came to", "outcome")
        self.judge_failures = self._counter(
            "judge_failures", "Times that a turn could not be judged, by the reason", "reason"
        )
        self.judging = self._gauge("judging", "Turns that are being judged")
        self.feedback = self._counter("feedback", "Thumbs given by people", "thumb")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"openclaw_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"openclaw_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"openclaw_{name}", text, buckets=_SECONDS, registry=self.registry)
