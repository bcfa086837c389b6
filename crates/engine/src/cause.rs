//! What a proc is woken by: one type from the event to the working set, the meters and what people
//! read.

use kip_clocks::Source;
use kip_net::custody::SocketKind;
use kip_net::wake::{Trigger, WakeEvent};
use kip_pager::protocol::Purpose;
use std::fmt;

/// What a proc is woken by. Displayed as `tcp 0.0.0.0:80 (connection)`, `timer (timerfd)`,
/// `kip wake`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WakeCause {
    /// Something at one of its descriptors.
    Descriptor(SocketKind, Trigger),
    /// Something at one of its descriptors, which another daemon had handed to the pager: it is not
    /// known which.
    SomeDescriptor,
    /// The program touched its memory: no client has to know which of the program's calls ended.
    Touch,
    /// A timer.
    Timer(Source),
    /// Its pager was replaced, and the program had touched its memory meanwhile.
    PagerReplaced,
    /// A request of its owner, or of the daemon.
    Request(WakeCommand),
}

/// Requests that wake a proc.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WakeCommand {
    /// `kip wake`.
    Wake,
    /// `kip exec`.
    Exec,
    /// `kip up`, of what was awake when the machine was put to rest.
    Up,
    /// `kip stop`: the program is to end in order.
    Stop,
    /// `kip kill -s`: a signal is for the program as a packet is.
    Signal,
    /// The program's files were copied while it stood still, for that: a backup, a clone.
    StoodStill(&'static str),
    /// An older generation, for the newest one cannot be woken.
    Fallback,
}

/// All that [`WakeCause::word`] gives.
pub const WORDS: [&str; 8] = ["tcp", "udp", "timer", "touch", "exec", "wake", "stop", "other"];

impl WakeCause {
    /// Of an event at a descriptor in custody.
    pub fn of<K>(event: &WakeEvent<K>) -> WakeCause {
        WakeCause::Descriptor(event.socket, event.trigger)
    }

    /// The protocol and the local port of the socket that it is about.
    fn port(&self) -> Option<(&'static str, u16)> {
        match self {
            WakeCause::Descriptor(SocketKind::Listener { local, .. } | SocketKind::Stream { local, .. }, _) => {
                Some(("tcp", local.port()))
            }
            WakeCause::Descriptor(SocketKind::Udp { local }, _) => Some(("udp", local.port())),
            _ => None,
        }
    }

    /// Whether a packet has come: a time-out that passes during the wake comes after that.
    pub fn is_packet(&self) -> bool {
        self.port().is_some()
    }

    /// Whether files have changed that the program watches.
    pub fn is_files(&self) -> bool {
        matches!(self, WakeCause::Descriptor(SocketKind::Inotify, _))
    }

    /// What the daemon tells the pager that the wake is for. Each port has a working set of its
    /// own; so have timers, changed files, requests, and the work that a program was at when it was
    /// frozen.
    pub fn purpose(&self) -> Purpose {
        let set = match (self.port(), self) {
            (Some((protocol, port)), _) => format!("{protocol} {port}"),
            (_, WakeCause::Timer(Source::Work)) => "work".to_owned(),
            (_, WakeCause::Timer(_)) => "timer".to_owned(),
            _ if self.is_files() => "files".to_owned(),
            _ => "call".to_owned(),
        };
        Purpose { set, packet: self.is_packet() }
    }

    /// The same as its text, with the thread that was at work when the program was frozen: its
    /// number inside and its name.
    pub fn with_thread(&self, at_work: Option<&(u32, String)>) -> String {
        match (self, at_work) {
            (WakeCause::Timer(Source::Work), Some((thread, name))) => {
                format!("timer (it was at work: thread {thread}, {name})")
            }
            _ => self.to_string(),
        }
    }

    /// What it is called in meters and metrics: few words, however many sockets there are.
    pub fn word(&self) -> &'static str {
        match self {
            WakeCause::Timer(_) => "timer",
            WakeCause::Touch => "touch",
            WakeCause::Request(WakeCommand::Exec) => "exec",
            WakeCause::Request(WakeCommand::Wake | WakeCommand::Up | WakeCommand::Signal) => "wake",
            WakeCause::Request(WakeCommand::Stop) => "stop",
            _ => self.port().map_or("other", |(protocol, _)| protocol),
        }
    }
}

impl fmt::Display for WakeCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WakeCause::Descriptor(kind, trigger) => return write!(f, "{kind} ({trigger})"),
            WakeCause::Timer(source) => return write!(f, "timer ({})", kip_records::due::source_word(*source)),
            WakeCause::SomeDescriptor => "one of its descriptors",
            WakeCause::Touch => "first touch",
            WakeCause::PagerReplaced => "its pager was replaced",
            WakeCause::Request(WakeCommand::Wake) => "kip wake",
            WakeCause::Request(WakeCommand::Exec) => "kip exec",
            WakeCause::Request(WakeCommand::Signal) => "kip kill",
            WakeCause::Request(WakeCommand::Up) => "kip up",
            WakeCause::Request(WakeCommand::Stop) => "stop",
            WakeCause::Request(WakeCommand::StoodStill(purpose)) => purpose,
            WakeCause::Request(WakeCommand::Fallback) => "fallback",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wake_for_work_names_the_thread() {
        let thread = (19, "GC Thread#0".to_owned());
        let text = |cause: WakeCause| cause.with_thread(Some(&thread));
        assert_eq!(text(WakeCause::Timer(Source::Work)), "timer (it was at work: thread 19, GC Thread#0)");
        assert_eq!(text(WakeCause::Timer(Source::Timerfd)), "timer (timerfd)");
    }

    #[test]
    fn each_cause_has_its_text_its_working_set_and_its_word() {
        let local = "0.0.0.0:6379".parse().unwrap();
        let v6 = SocketKind::Stream {
            local: "[::ffff:10.213.0.1]:7100".parse().unwrap(),
            peer: "[::ffff:10.213.0.255]:59720".parse().unwrap(),
        };
        let descriptor = WakeCause::Descriptor;
        let request = WakeCause::Request;
        for (cause, text, set, word) in [
            (
                descriptor(SocketKind::Listener { local, backlog: 5 }, Trigger::Connection),
                "tcp 0.0.0.0:6379 (connection)",
                "tcp 6379",
                "tcp",
            ),
            (
                descriptor(v6, Trigger::Data),
                "tcp [::ffff:10.213.0.1]:7100 from [::ffff:10.213.0.255]:59720 (data)",
                "tcp 7100",
                "tcp",
            ),
            (
                descriptor(SocketKind::Udp { local }, Trigger::Datagram),
                "udp 0.0.0.0:6379 (datagram)",
                "udp 6379",
                "udp",
            ),
            (descriptor(SocketKind::Inotify, Trigger::Changed), "watched files (changed)", "files", "other"),
            (descriptor(SocketKind::Other, Trigger::Data), "of another kind (data)", "call", "other"),
            (WakeCause::Timer(Source::Timerfd), "timer (timerfd)", "timer", "timer"),
            (WakeCause::Timer(Source::Work), "timer (it was at work)", "work", "timer"),
            (WakeCause::Touch, "first touch", "call", "touch"),
            (request(WakeCommand::Exec), "kip exec", "call", "exec"),
            (request(WakeCommand::Signal), "kip kill", "call", "wake"),
            (request(WakeCommand::Up), "kip up", "call", "wake"),
            (request(WakeCommand::Stop), "stop", "call", "stop"),
        ] {
            assert_eq!(cause.to_string(), text);
            let packet = matches!(word, "tcp" | "udp");
            assert_eq!(cause.purpose(), Purpose { set: set.to_owned(), packet }, "{text}");
            assert_eq!(cause.word(), word, "{text}");
            assert!(WORDS.contains(&word));
        }
    }
}
