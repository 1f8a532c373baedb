"""The learner: batches from the book, an algorithm, a step, a new version of the policy."""
