"""Celery: a task every seven seconds by beat, through redis."""

import time

from celery import Celery

app = Celery("tasks", broker="redis://127.0.0.1:6379/0")
app.conf.beat_schedule = {"job": {"task": "tasks.job", "schedule": 7.0}}


@app.task
def job():
    with open("/srv/ran", "a") as file:
        file.write(f"ran {time.time():.3f}\n")
