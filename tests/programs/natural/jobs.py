"""A job every so many seconds by APScheduler or by `schedule`; each run writes when it ran, in seconds since the epoch."""

import sys
import time

how, every = sys.argv[1], int(sys.argv[2])


def job():
    print(f"ran {time.time():.3f}", flush=True)


if how == "apscheduler":
    from apscheduler.schedulers.blocking import BlockingScheduler

    scheduler = BlockingScheduler(timezone="UTC")
    scheduler.add_job(job, "interval", seconds=every)
    scheduler.start()
else:
    import schedule

    schedule.every(every).seconds.do(job)
    while True:
        schedule.run_pending()
        time.sleep(1)
