"""General helpers without domain knowledge: tasks, workqueue, backoff, rate limits, files, logs."""
