"""Live: chat traffic as a source of turns, for a learner that runs beside it. Free of torch and TRL."""
