//! The API's views as people read them.

use kip_text::{ago, bytes, micros, millis, one_line, table, utc};
use kip_types::StateName;
use kip_types::api::clone::{CloneAdvice, ClonesView};
use kip_types::api::{
    Event, Moved, NextWakeView, PortView, ProbeView, ProcView, RefusedCallView, SeenView, SleepView, TimerView,
    WakeView, WhyView,
};
use kip_types::spec::{Capability, Image, Spec};
use kip_types::volume::{VolumeSource, VolumeSpec};
use std::fmt::Write;

/// Calls that the egress rules of a proc refused, in lines for people.
const MOST_CALLS: usize = 8;
/// Longest bar of a wake's step, characters.
const BAR_MAX: u64 = 40;

/// `kip run`: the name and where it is reached.
pub fn run(view: &ProcView) -> String {
    if view.ports.is_empty() {
        return format!("{}\n", view.name);
    }
    let row = |port| vec![view.name.to_string(), reached(port)];
    table(&view.ports.iter().map(row).collect::<Vec<_>>())
}

/// `kip clone`: the clones and where they are reached, and how long the source stood still.
pub fn clones(source: &str, made: &ClonesView) -> String {
    let rows: String = made.clones.iter().map(run).collect();
    let stood = match made.still_us {
        0 => String::new(),
        us => format!(", {source} stood still {}", micros(us)),
    };
    let notes: String = made.notes.iter().map(|note| format!("note: {note}\n")).collect();
    let chosen = made.why.as_ref().map(|why| format!("{}: {why}\n", made.method)).unwrap_or_default();
    format!("{rows}cloned in {}{stood}\n{chosen}{notes}", micros(made.total_us))
}

/// What `kip clone --explain` shows.
pub fn clone_advice(advice: &CloneAdvice) -> String {
    let CloneAdvice { name, method, why, better, memory_bytes, limit_bytes, reread_bytes_per_s, .. } = advice;
    let limit = limit_bytes.map(|limit| format!(" of {}", bytes(limit))).unwrap_or_default();
    let reads = match reread_bytes_per_s {
        Some(reads) => format!("{}/s read again that were pushed out", bytes(*reads)),
        None => "not watched".to_owned(),
    };
    let better = better.as_ref().map(|better| format!("{better}\n")).unwrap_or_default();
    format!("{name} is best cloned {method}: {why}\n{better}memory {}{limit}, {reads}\n", bytes(*memory_bytes))
}

/// `tcp 80 -> 0.0.0.0:8080`
fn reached(port: &PortView) -> String {
    format!("{} {} -> {}", port.proto, port.port, host_side(port))
}

pub fn host_side(port: &PortView) -> String {
    match port.host_port {
        Some(host_port) => std::net::SocketAddr::new(port.host_addr, host_port).to_string(),
        None => format!("{}, for other procs", std::net::SocketAddr::new(port.addr, port.port)),
    }
}

/// `restarting in 3.2s, 4 times`
pub fn state(view: &ProcView) -> String {
    match view.next_start_ms {
        Some(ms) => format!("restarting in {} ({} so far)", millis(ms), view.restarts),
        None if view.does_not_answer => format!("{}, does not answer", view.state),
        None => view.state.to_string(),
    }
}

pub fn dash() -> String {
    "-".to_owned()
}

pub fn or_dash(text: String) -> String {
    if text.is_empty() { dash() } else { text }
}

/// The command as a shell would read it.
pub fn command(spec: &Spec) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    let quoted = spec.command.iter().map(|word| {
        if !word.is_empty() && word.chars().all(plain) {
            word.clone()
        } else {
            format!("'{}'", word.replace('\'', "'\\''"))
        }
    });
    one_line(&quoted.collect::<Vec<_>>().join(" "))
}

/// Named values below each other, under titles.
#[derive(Default)]
struct Sections(String);

impl Sections {
    fn add(&mut self, title: &str, rows: Vec<(&str, String)>) {
        if rows.is_empty() {
            return;
        }
        let gap = if self.0.is_empty() { "" } else { "\n" };
        let rows: Vec<_> = rows.into_iter().map(|(key, value)| vec![format!("  {key}"), one_line(&value)]).collect();
        write!(self.0, "{gap}{title}\n{}", table(&rows)).expect("a String takes every write");
    }
}

/// `kip inspect`.
pub fn inspect(view: &ProcView) -> String {
    let mut text = Sections::default();
    let mut rows = vec![
        ("state", state(view)),
        ("tier", view.tier.map_or_else(dash, |tier| tier.to_string())),
        ("realm", view.realm.to_string()),
        ("worker", view.worker.clone()),
        ("generation", view.generation.to_string()),
        ("pids", or_dash(view.pids.iter().map(u32::to_string).collect::<Vec<_>>().join(" "))),
    ];
    rows.extend(view.exit.iter().map(|exit| ("exit", exit.clone())));
    rows.extend(view.started_at_ms.map(|at_ms| ("started", format!("{} ({})", utc(at_ms), ago(at_ms)))));
    rows.extend(view.idle_ms.map(|ms| ("idle", millis(ms))));
    rows.extend(view.ready.map(|ready| ("ready", if ready { "yes" } else { "no" }.to_owned())));
    rows.extend(view.probes.iter().map(|probe| ("probe", probed(probe))));
    rows.extend((view.restarts > 0).then(|| ("restarts", view.restarts.to_string())));
    rows.extend(view.next_start_ms.map(|ms| ("next start", format!("in {}", millis(ms)))));
    rows.extend(view.next_timer_ms.map(|ms| ("next timer", format!("in {}", millis(ms)))));
    text.add(view.name.as_str(), rows);
    text.add("program", program(&view.spec));
    let ports = view.ports.iter();
    text.add("ports", ports.map(|p| ("", format!("{}, inside {}", reached(p), p.addr))).collect());
    let memory = &view.memory;
    text.add(
        "memory",
        vec![
            ("resident", bytes(memory.rss_bytes)),
            ("proportional", bytes(memory.pss_bytes)),
            ("kernel", bytes(memory.kernel_bytes)),
            ("swapped", bytes(memory.swap_bytes)),
            ("working set", format!("{} pages", memory.working_set_pages)),
        ],
    );
    text.add("limits and sleep", limits(view));
    text.add("last sleep", view.last_sleep.iter().flat_map(last_sleep).collect());
    text.add("last wake", view.last_wake.iter().flat_map(last_wake).collect());
    text.0 + &view.last_wake.as_ref().map(|wake| indent(&steps(wake))).unwrap_or_default()
}

fn program(spec: &Spec) -> Vec<(&'static str, String)> {
    let mut rows = vec![("command", command(spec))];
    rows.extend(spec.workdir.iter().map(|dir| ("directory", dir.display().to_string())));
    // The values are not for every eye: `kip inspect --env`.
    let names: Vec<&str> = spec.env.keys().map(String::as_str).collect();
    rows.extend((!names.is_empty()).then(|| ("environment", names.join(" "))));
    rows.push(match &spec.image {
        Image::Host => ("image", "host".to_owned()),
        Image::Tar(path) => ("image", format!("tarball {}", path.display())),
        Image::Oci(image) => ("image", format!("{} ({})", image.reference, image.digest)),
    });
    let volumes = spec.volumes.iter().filter(|v| v.source != VolumeSource::Secrets);
    rows.extend(volumes.map(|v| ("volume", volume(v))));
    rows.extend(spec.secrets.iter().map(|name| ("secret", name.clone())));
    rows.extend(spec.hostname.iter().map(|name| ("host name", name.clone())));
    rows.extend(spec.extra_hosts.iter().map(|host| ("knows", host.to_string())));
    rows.extend(spec.egress.iter().map(|rule| ("may call", rule.to_string())));
    rows.extend(spec.labels.iter().map(|(key, value)| ("label", format!("{key}={value}"))));
    rows.extend(spec.user.iter().map(|user| ("user", user.clone())));
    rows.extend(spec.stop_signal.iter().map(|signal| ("stop signal", signal.clone())));
    rows.extend(spec.stop_grace_ms.map(|ms| ("stop grace", millis(ms))));
    rows.extend((!spec.restart.is_no()).then(|| ("restart", spec.restart.to_string())));
    rows.extend(spec.ready.iter().map(|r| ("ready when", format!("{} within {}", r.check, millis(r.within_ms)))));
    rows.extend((!spec.sandbox.is_full()).then(|| ("sandbox", spec.sandbox.to_string())));
    rows.extend(spec.read_only.then(|| ("root", "read-only".to_owned())));
    rows.extend(spec.tmpfs.iter().map(|one| ("tmpfs", one.to_string())));
    rows.extend(spec.shm_bytes.map(|n| ("/dev/shm", bytes(n))));
    let words = |of: &[Capability]| of.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    rows.extend((!spec.cap_add.is_empty()).then(|| ("cap-add", words(&spec.cap_add))));
    rows.extend((!spec.cap_drop.is_empty()).then(|| ("cap-drop", words(&spec.cap_drop))));
    rows.extend(spec.allow_setuid.then(|| ("setuid", "allowed".to_owned())));
    rows.extend((!spec.tree.is_none()).then(|| ("name tree", spec.tree.to_string())));
    rows
}

/// `9000 (http:80/health): unhealthy 2.0 s ago, status 500`
fn probed(probe: &ProbeView) -> String {
    let when = probe.checked_ms.map(|ms| format!(" {} ago", millis(ms))).unwrap_or_default();
    let why = probe.reason.iter().map(|why| format!(", {}", one_line(why))).collect::<String>();
    format!("{} ({}): {}{when}{why}", probe.host_port, probe.check, probe.health)
}

/// `db at /data`
fn volume(volume: &VolumeSpec) -> String {
    format!("{} at {}{}", volume.source, volume.target, if volume.read_only { ", read-only" } else { "" })
}

fn limits(view: &ProcView) -> Vec<(&'static str, String)> {
    let spec = &view.spec;
    let timing = &spec.timing;
    let mut rows = vec![
        ("memory", spec.limits.memory_bytes.map_or_else(|| "unlimited".to_owned(), bytes)),
        ("cpus", spec.limits.cpus.map_or_else(|| "unlimited".to_owned(), |n| n.to_string())),
        ("processes", spec.limits.pids.to_string()),
        (
            "disk",
            match (view.disk_bytes, spec.limits.disk_bytes) {
                (taken, Some(limit)) => format!("{} of {}", bytes(taken.unwrap_or(0)), bytes(limit)),
                (_, None) => "unlimited".to_owned(),
            },
        ),
        (
            "leaves hot",
            match (timing.never, timing.dry_run) {
                (true, _) => "only when told to".to_owned(),
                (_, true) => format!("never; idle {} is only tried", millis(timing.idle_ms)),
                _ => format!("idle {}", millis(timing.idle_ms)),
            },
        ),
        ("parked", format!("{} after that", millis(timing.park_after_ms))),
        (
            "archived",
            match timing.archive_by_default {
                true => format!(
                    "{} after that, where there is a store that is no directory and no client is connected",
                    millis(timing.archive_after_ms)
                ),
                false => format!("{} after that, where there is a store", millis(timing.archive_after_ms)),
            },
        ),
        ("falls back to", timing.fallback.to_string()),
        ("ticks below", millis(timing.tick_ms)),
        ("clock asleep", timing.clock.to_string()),
    ];
    rows.extend(spec.ulimits.iter().map(|limit| ("each process", limit.to_string())));
    rows
}

fn last_sleep(sleep: &SleepView) -> Vec<(&'static str, String)> {
    let mut rows = vec![
        ("when", format!("{} ({})", utc(sleep.at_ms), ago(sleep.at_ms))),
        ("to", sleep.to.to_string()),
        ("stood still", micros(sleep.frozen_us)),
        ("in all", micros(sleep.total_us)),
        ("written", bytes(sleep.bytes_written)),
        ("memory of its own", sleep.own_bytes.map_or_else(dash, bytes)),
    ];
    rows.extend(sleep.cause.iter().map(|cause| ("because", cause.clone())));
    rows
}

fn last_wake(wake: &WakeView) -> Vec<(&'static str, String)> {
    let mut rows = vec![
        ("when", format!("{} ({})", utc(wake.at_ms), ago(wake.at_ms))),
        ("from", wake.from.to_string()),
        ("by", wake.trigger.clone()),
        ("in all", micros(wake.total_us)),
    ];
    rows.extend(wake.fetched.iter().map(|came| {
        let (store, cache) = (bytes(came.store_bytes), bytes(came.cache_bytes));
        ("fetched", format!("{store} from the store by {} requests, {cache} from the cache", came.requests))
    }));
    rows
}

/// A wake's steps with a bar for each one's share.
fn steps(wake: &WakeView) -> String {
    let longest = wake.steps.iter().map(|step| step.us).max().unwrap_or(0).max(1);
    let times: Vec<String> = wake.steps.iter().map(|step| micros(step.us)).collect();
    let width = times.iter().map(String::len).max().unwrap_or(0);
    let rows = wake.steps.iter().zip(times).map(|(step, time)| {
        let bar = usize::try_from((step.us * BAR_MAX).div_ceil(longest)).expect("at most BAR_MAX");
        vec![one_line(&step.name), format!("{time:>width$}"), "#".repeat(bar)]
    });
    table(&rows.collect::<Vec<_>>())
}

fn indent(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}

/// `kip sleep`.
pub fn sleep(moved: &Moved) -> String {
    let name = &moved.proc.name;
    match &moved.proc.last_sleep {
        Some(sleep) if !moved.already => {
            let woke = moved.proc.last_wake.as_ref().filter(|_| moved.proc.tier != Some(sleep.to));
            let since = woke.map_or_else(String::new, |wake| {
                format!("; it woke since, by {}, and is {}", one_line(&wake.trigger), moved.proc.state)
            });
            format!(
                "{name} {} in {}, stood still {}, wrote {}{since}\n",
                sleep.to,
                micros(sleep.total_us),
                micros(sleep.frozen_us),
                bytes(sleep.bytes_written)
            )
        }
        _ => format!("{name} is {}\n", moved.proc.state),
    }
}

/// `kip wake`.
pub fn wake(moved: &Moved) -> String {
    let name = &moved.proc.name;
    match &moved.proc.last_wake {
        Some(wake) if !moved.already => {
            let (time, trigger) = (micros(wake.total_us), one_line(&wake.trigger));
            format!("{name} woke from {} in {time} by {trigger}\n{}", wake.from, indent(&steps(wake)))
        }
        _ => format!("{name} is {}\n", moved.proc.state),
    }
}

fn best_clone(advice: &CloneAdvice) -> String {
    let better = advice.better.as_ref().map(|better| format!("; {better}")).unwrap_or_default();
    format!("{} is best: {}{better}", advice.method, advice.why)
}

/// `kip why`: the reasons, then what was seen, then where the time of the last wake went.
pub fn why(why: &WhyView) -> String {
    let mut rows = Vec::new();
    rows.extend(why.awake_because.iter().map(|line| ("awake because", line.clone())));
    let stays = match why.state {
        StateName::Parked => "stays parked",
        StateName::Hibernated => "stays hibernated",
        _ => "cannot sleep",
    };
    rows.extend(why.cannot_sleep.iter().map(|line| (stays, line.clone())));
    let cause = why
        .last_sleep
        .as_ref()
        .filter(|_| why.activity.is_none() && why.state != StateName::Stopped)
        .and_then(|sleep| sleep.cause.as_ref());
    rows.extend(cause.map(|cause| ("asleep because", cause.clone())));
    rows.extend(why.clock.iter().map(|line| ("clock", line.clone())));
    rows.extend(why.next_wake.iter().map(|next| ("next wake", next_wake(next))));
    rows.extend(why.pinned_by.iter().map(|line| ("pinned by", line.clone())));
    rows.extend(why.fell_back.iter().map(|line| ("fell back", line.clone())));
    rows.extend(why.clone.iter().map(|advice| ("clone", best_clone(advice))));
    rows.extend(why.egress_refused.iter().take(MOST_CALLS).map(|call| ("may not call", refused_call(call))));
    let more = why.egress_refused.len().saturating_sub(MOST_CALLS);
    rows.extend((more > 0).then(|| ("may not call", format!("and {more} more"))));
    let taken = why.taken_over_by.as_ref();
    rows.extend(
        taken.map(|by| {
            ("taken over by", format!("data directory {by}; `kip rm {}` removes what is left here", why.name))
        }),
    );
    let mut text = Sections::default();
    let title = format!("{} is {}", why.name, why.state);
    if rows.is_empty() {
        text.0 = format!("{title}\n");
    }
    text.add(&title, rows);
    if let Some(seen) = &why.seen {
        text.add("timers", timers(seen));
    }
    text.add("last wake", why.last_wake.iter().flat_map(last_wake).collect());
    let steps = why.last_wake.iter().flat_map(|wake| &wake.steps);
    let rows: Vec<_> =
        steps.map(|step| vec![format!("    {}", one_line(&step.name)), format!("{:>9} us", step.us)]).collect();
    text.0 + &table(&rows)
}

fn refused_call(call: &RefusedCallView) -> String {
    format!("{}, which its egress rules do not name, {}", call.to, ago(call.at_ms))
}

fn next_wake(next: &NextWakeView) -> String {
    let due = millis(next.due_ms);
    match next.gathered {
        true => format!("in {due} for ticks ({}), which are gathered", next.kind),
        false => format!("for a timer ({}) that is due in {due}", next.kind),
    }
}

fn timers(seen: &SeenView) -> Vec<(&'static str, String)> {
    let row = |timer: &TimerView| {
        let thread = timer.tid.map(|tid| format!(", tid {tid}")).unwrap_or_default();
        let due = timer.due_ms.map_or_else(|| "is set".to_owned(), |ms| format!("is due in {}", millis(ms)));
        let every = timer.every_ms.map(|ms| format!(", every {}", millis(ms))).unwrap_or_default();
        let (name, pid) = (&timer.program.name, timer.program.pid);
        ("", format!("{} of {name} (pid {pid}{thread}) {due}{every}", timer.kind))
    };
    seen.timers.iter().map(row).collect()
}

/// One line of `kip events`.
pub fn event(event: &Event) -> String {
    let name = event.name.as_ref().map_or("-", |name| name.as_str());
    let line =
        format!("{}  {name:<16}  {:<9}  {}", utc(event.at_ms), one_line(event.kind.as_ref()), one_line(&event.detail));
    format!("{}\n", line.trim_end())
}

/// A proc as the daemon shows it, with what a test says of it.
#[cfg(test)]
pub fn a_proc(json: serde_json::Value) -> ProcView {
    let mut base = serde_json::json!({
        "name": "web", "realm": "default", "state": "running", "tier": "hot", "worker": "m1", "generation": 2,
        "ports": [{"proto": "tcp", "port": 80, "addr": "10.213.0.1", "host_addr": "0.0.0.0", "host_port": 8080}],
        "pids": [41, 42],
        "memory": {"rss_bytes": 5 << 20, "pss_bytes": 3 << 20, "kernel_bytes": 0, "swap_bytes": 0, "working_set_pages": 0},
        "last_sleep": null, "last_wake": null, "exit": null, "idle_ms": 1500, "next_timer_ms": null,
        "spec": {"name": "web", "command": ["sh", "-c", "echo 'a b'; \u{1b}"]},
    });
    base.as_object_mut().unwrap().extend(json.as_object().unwrap().clone());
    serde_json::from_value(base).unwrap()
}

/// A wake of such a proc.
#[cfg(test)]
pub fn a_wake() -> serde_json::Value {
    let steps = [("helper", 400), ("restore processes", 6000), ("resume", 1)];
    let steps = steps.map(|(name, us)| serde_json::json!({ "name": name, "us": us }));
    serde_json::json!({"trigger": "tcp 0.0.0.0:80 (connection)", "from": "parked", "total_us": 7500, "steps": steps, "at_ms": kip_text::now_ms() - 180_500})
}

#[cfg(test)]
mod tests {
    use super::*;
    use kip_types::api::EventKind;

    #[test]
    fn run_names_the_ports() {
        assert_eq!(run(&a_proc(serde_json::json!({}))), "web  tcp 80 -> 0.0.0.0:8080\n");
        assert_eq!(run(&a_proc(serde_json::json!({"ports": []}))), "web\n");
    }

    #[test]
    fn a_wakes_steps_have_bars() {
        let moved = Moved { proc: a_proc(serde_json::json!({"last_wake": a_wake()})), already: false };
        let bar = "#".repeat(40);
        let expected = format!(
            "web woke from parked in 7.5ms by tcp 0.0.0.0:80 (connection)\n  helper             400us  ###\n  restore processes  6.0ms  {bar}\n  resume               1us  #\n"
        );
        assert_eq!(super::wake(&moved), expected);
        let already = Moved { already: true, ..moved };
        assert_eq!(super::wake(&already), "web is running\n");
    }

    #[test]
    fn inspect_shows_every_section() {
        let sleep = serde_json::json!({"to": "parked", "frozen_us": 9000, "total_us": 21000, "bytes_written": 3 << 20, "at_ms": 0});
        let text =
            inspect(&a_proc(serde_json::json!({"last_wake": a_wake(), "last_sleep": sleep, "next_timer_ms": 5000})));
        for line in [
            "web",
            "  generation  2",
            "  pids        41 42",
            "  next timer  in 5.0s",
            "ports",
            "    tcp 80 -> 0.0.0.0:8080, inside 10.213.0.1",
            "  resident      5.0M",
            "last sleep",
            "  stood still        9.0ms",
            "last wake",
            "  by      tcp 0.0.0.0:80 (connection)",
            "  helper             400us  ###",
        ] {
            assert!(text.lines().any(|l| l == line), "{line:?} is not in\n{text}");
        }
        assert!(!text.contains('\u{1b}'));
    }

    #[test]
    fn why_reports_timers_and_each_step_of_the_wake() {
        let program = serde_json::json!({"name": "web", "pid": 2});
        let timer = |kind: &str, due: Option<u64>, tid: Option<u32>| serde_json::json!({"kind": kind, "program": program, "tid": tid, "due_ms": due, "every_ms": null});
        let timers = [timer("timerfd", Some(5000), None), timer("time-out of futex", None, Some(9))];
        let why: WhyView = serde_json::from_value(serde_json::json!({
            "name": "web", "state": "running", "awake_because": ["x"], "cannot_sleep": [], "last_wake": a_wake(),
            "seen": {"watched_us": 1, "threads": [], "sockets": [], "sockets_in_all": 0, "timers": timers, "execs": []},
        }))
        .unwrap();
        let text = super::why(&why);
        for line in [
            "    timerfd of web (pid 2) is due in 5.0s",
            "    time-out of futex of web (pid 2, tid 9) is set",
            "  by      tcp 0.0.0.0:80 (connection)",
            "    helper                   400 us",
            "    restore processes       6000 us",
        ] {
            assert!(text.lines().any(|l| l == line), "{line:?} is not in\n{text}");
        }
        let next = serde_json::json!({"kind": "timerfd", "due_ms": 5000, "begins_ms": 4900, "gathered": false});
        let asleep: WhyView = serde_json::from_value(serde_json::json!({
            "name": "web", "state": "parked", "awake_because": [], "cannot_sleep": [], "next_wake": next, "last_wake": null,
        }))
        .unwrap();
        assert_eq!(super::why(&asleep), "web is parked\n  next wake  for a timer (timerfd) that is due in 5.0s\n");
    }

    #[test]
    fn why_and_events_are_lines() {
        let why: WhyView = serde_json::from_value(serde_json::json!({
            "name": "web", "state": "running", "awake_because": ["a request 2 s ago"],
            "cannot_sleep": ["descriptor 7 is an io_uring"], "last_wake": null,
            "clone": {
                "name": "web", "method": "hot", "why": "it does not thrash", "better": "a template would help",
                "has_template": false, "memory_bytes": 1, "limit_bytes": null, "reread_bytes_per_s": 0,
            },
        }))
        .unwrap();
        let expected =
            "web is running\n  awake because  a request 2 s ago\n  cannot sleep   descriptor 7 is an io_uring\n";
        let cloned = "  clone          hot is best: it does not thrash; a template would help\n";
        assert_eq!(super::why(&why), format!("{expected}{cloned}"));
        assert!(super::clone_advice(&why.clone.unwrap()).contains("\na template would help\n"));
        let event = Event { id: 1, at_ms: 0, name: None, kind: EventKind::Ready, detail: "pid\n7".into() };
        assert_eq!(super::event(&event), "1970-01-01T00:00:00.000Z  -                 ready      pid 7\n");
    }
}
