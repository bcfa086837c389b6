//! When sleeping threads are to be woken by the kernel's own timers, as /proc/timer_list shows
//! them.
//!
//! The list names no threads, but a thread that is broken off in its sleep takes its timer with it:
//! what the list has before that and not after it is the thread's, or belongs to one of the few
//! others on the machine that woke early at the same moment.
//!
//! The list is no snapshot: the kernel counts from a queue's beginning for each timer that it
//! shows, and skips one when another before it expires meanwhile. So it is read twice, and a timer
//! is there that one of the two shows.

use std::collections::HashSet;
use std::fs;

/// Timers that wake a thread: the kernel's name for each, and when it expires, nanoseconds of
/// CLOCK_MONOTONIC.
#[derive(Debug, Default)]
pub struct Armed(HashSet<(String, i64)>);

impl Armed {
    /// Those that there are now; none where the kernel does not show them.
    pub fn now() -> Armed {
        let read = || parse(&fs::read_to_string("/proc/timer_list").unwrap_or_default());
        let mut found = read();
        found.extend(read());
        Armed(found)
    }

    /// When those would have expired that are not there any more, nanoseconds of CLOCK_MONOTONIC.
    pub fn gone(&self) -> Vec<i64> {
        let now = Armed::now();
        self.0.difference(&now.0).map(|(_, expires)| *expires).collect()
    }
}

/// For each timer a line with its name and function and one with when it expires, by a clock whose
/// offset from CLOCK_MONOTONIC stands before its timers. A range begins with the time that the
/// thread asked for.
fn parse(text: &str) -> HashSet<(String, i64)> {
    let (mut offset, mut name) = (0, None);
    let mut found = HashSet::new();
    for line in text.lines().map(str::trim) {
        if let Some(value) = line.strip_prefix(".offset:") {
            offset = value.split_whitespace().next().and_then(|ns| ns.parse::<i64>().ok()).unwrap_or(0);
        } else if line.contains(", hrtimer_wakeup,") {
            name = line.split(['<', '>']).nth(1);
        } else if let Some(value) = line.strip_prefix("# expires at ")
            && let Some(name) = name.take()
            && let Some(expires) = value.split(['-', ' ']).next().and_then(|ns| ns.parse::<i64>().ok())
        {
            found.insert((name.to_owned(), expires - offset));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn reads_the_kernel_s_words() {
        let text = "cpu: 0\n clock 0:\n  .base:       0000000058400b99\n  .offset:     0 nsecs\nactive timers:\n\
             #0: <0000000058400b99>, tick_nohz_handler, S:01\n # expires at 100-100 nsecs [in 1 to 1 nsecs]\n\
             #1: <00000000172187fc>, hrtimer_wakeup, S:01\n # expires at 5000-5050 nsecs [in 4900 to 4950 nsecs]\n\
             clock 1:\n  .offset:     700 nsecs\nactive timers:\n\
             #0: <00000000172187fd>, hrtimer_wakeup, S:01\n # expires at 5700-5700 nsecs [in 1 to 1 nsecs]\n";
        let named = |name: &str| (name.to_owned(), 5000);
        assert_eq!(parse(text), HashSet::from([named("00000000172187fc"), named("00000000172187fd")]));
        assert!(parse("").is_empty());
    }

    #[test]
    fn a_sleeping_thread_has_a_timer_that_is_gone_when_it_has_woken() {
        let began = crate::ran::monotonic_ns();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        // Others on this machine sleep for a minute or an hour, none for as long as this.
        let seconds = 3000 + u64::from(std::process::id() % 500);
        let sleeper = std::thread::spawn(move || ended.recv_timeout(Duration::from_secs(seconds)).is_ok());
        let ours = |ns: &i64| (0..1_000_000_000).contains(&(ns - began - seconds as i64 * 1_000_000_000));
        let until = std::time::Instant::now() + Duration::from_secs(10);
        let armed = loop {
            let armed = Armed::now();
            if armed.0.iter().any(|(_, ns)| ours(ns)) || std::time::Instant::now() > until {
                break armed;
            }
        };
        assert!(!armed.gone().iter().any(ours));
        end.send(()).unwrap();
        assert!(sleeper.join().unwrap());
        assert!(armed.gone().iter().any(ours));
    }
}
