//! What the user of `kip top` looks at: by which column procs are sorted, how far they are
//! scrolled, and the help. Pure: keys in, a [`Look`] out.

use kip_types::api::TopProc;
use std::cmp::Ordering;

/// What procs are sorted by. Figures have the largest first; of equal ones the order of the answer
/// stays.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Sort {
    /// The order of the answer: tier, then memory.
    #[default]
    Tier,
    Name,
    Memory,
    Saved,
    Idle,
    Cpu,
    Wakes,
    LastWake,
}

/// Keys that sort: the key, what it sorts by, the column's number and its name for people.
pub const SORTS: [(u8, Sort, usize, &str); 8] = [
    (b't', Sort::Tier, 2, "tier, then memory"),
    (b'n', Sort::Name, 0, "name"),
    (b'm', Sort::Memory, 3, "memory"),
    (b's', Sort::Saved, 4, "memory saved"),
    (b'i', Sort::Idle, 5, "idle time"),
    (b'c', Sort::Cpu, 6, "CPU"),
    (b'w', Sort::Wakes, 7, "wakes"),
    (b'l', Sort::LastWake, 8, "time of the last wake"),
];

impl Sort {
    /// The column whose title is marked.
    pub fn column(self) -> usize {
        SORTS.iter().find(|(_, sort, ..)| *sort == self).expect("each has a key").2
    }

    fn compare(self, a: &TopProc, b: &TopProc) -> Ordering {
        match self {
            Sort::Tier => Ordering::Equal,
            Sort::Name => a.name.cmp(&b.name),
            Sort::Memory => b.memory_bytes.cmp(&a.memory_bytes),
            Sort::Saved => b.saved_bytes.cmp(&a.saved_bytes),
            Sort::Idle => b.idle_ms.cmp(&a.idle_ms),
            Sort::Cpu => b.cpu_percent.unwrap_or(-1.0).total_cmp(&a.cpu_percent.unwrap_or(-1.0)),
            Sort::Wakes => b.wakes.cmp(&a.wakes),
            Sort::LastWake => b.last_wake_at_ms.cmp(&a.last_wake_at_ms),
        }
    }

    /// Procs in this order.
    pub fn sorted(self, procs: &[TopProc]) -> Vec<&TopProc> {
        let mut sorted: Vec<&TopProc> = procs.iter().collect();
        sorted.sort_by(|a, b| self.compare(a, b));
        sorted
    }
}

/// What a key does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyPress {
    Quit,
    Help,
    Sort(Sort),
    /// So many lines, or screens, down; up if negative.
    Lines(isize),
    Screens(isize),
    First,
    Last,
}

/// Keys from what a terminal sends, unknown ones left out: console_codes(4), xterm's ctlseqs.
pub fn keys(mut sent: &[u8]) -> Vec<KeyPress> {
    const SEQUENCES: [(&[u8], KeyPress); 12] = [
        (b"\x1b[A", KeyPress::Lines(-1)),
        (b"\x1b[B", KeyPress::Lines(1)),
        (b"\x1bOA", KeyPress::Lines(-1)),
        (b"\x1bOB", KeyPress::Lines(1)),
        (b"\x1b[5~", KeyPress::Screens(-1)),
        (b"\x1b[6~", KeyPress::Screens(1)),
        (b"\x1b[H", KeyPress::First),
        (b"\x1b[F", KeyPress::Last),
        (b"\x1bOH", KeyPress::First),
        (b"\x1bOF", KeyPress::Last),
        (b"\x1b[1~", KeyPress::First),
        (b"\x1b[4~", KeyPress::Last),
    ];
    let mut found = Vec::new();
    while let [first, rest @ ..] = sent {
        if let Some((sequence, key)) = SEQUENCES.iter().find(|(sequence, _)| sent.starts_with(sequence)) {
            found.push(*key);
            sent = &sent[sequence.len()..];
            continue;
        }
        found.extend(match *first {
            b'q' | b'Q' | super::CTRL_C => Some(KeyPress::Quit),
            b'?' | b'h' => Some(KeyPress::Help),
            b'j' => Some(KeyPress::Lines(1)),
            b'k' => Some(KeyPress::Lines(-1)),
            b' ' => Some(KeyPress::Screens(1)),
            b'b' => Some(KeyPress::Screens(-1)),
            b'g' => Some(KeyPress::First),
            b'G' => Some(KeyPress::Last),
            other => SORTS.iter().find(|(key, ..)| *key == other).map(|(_, sort, ..)| KeyPress::Sort(*sort)),
        });
        sent = rest;
    }
    found
}

/// What is looked at.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Look {
    pub sort: Sort,
    /// Procs above the first one that is shown.
    pub above: usize,
    /// The help is shown in place of the procs.
    pub help: bool,
}

impl Look {
    /// After a key that does not end it; of `procs` procs as many as `room` fit.
    pub fn after(self, key: KeyPress, procs: usize, room: usize) -> Look {
        let most = procs.saturating_sub(room);
        let down = |lines: isize| self.above.saturating_add_signed(lines).min(most);
        if self.help {
            // Any key closes it.
            return Look { help: false, ..self };
        }
        match key {
            KeyPress::Quit => self,
            KeyPress::Help => Look { help: true, ..self },
            KeyPress::Sort(sort) => Look { sort, above: 0, help: false },
            KeyPress::Lines(lines) => Look { above: down(lines), ..self },
            KeyPress::Screens(screens) => Look { above: down(screens.saturating_mul(room as isize)), ..self },
            KeyPress::First => Look { above: 0, ..self },
            KeyPress::Last => Look { above: most, ..self },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_known_by_what_terminals_send() {
        let sent = b"j\x1b[A\x1b[6~mx?\x1b[Fq";
        let expected = [
            KeyPress::Lines(1),
            KeyPress::Lines(-1),
            KeyPress::Screens(1),
            KeyPress::Sort(Sort::Memory),
            KeyPress::Help,
            KeyPress::Last,
            KeyPress::Quit,
        ];
        assert_eq!(keys(sent), expected);
    }

    #[test]
    fn scrolling_stays_within_the_procs() {
        let press = |look: Look, key| look.after(key, 50, 10);
        let at = |above| Look { above, ..Look::default() };
        assert_eq!(press(at(0), KeyPress::Lines(-1)), at(0));
        assert_eq!(press(at(0), KeyPress::Screens(1)), at(10));
        assert_eq!(press(at(35), KeyPress::Screens(1)), at(40));
        assert_eq!(press(at(0), KeyPress::Last), at(40));
        assert_eq!(at(0).after(KeyPress::Last, 5, 10), at(0), "all fit");
        let sorted = press(at(20), KeyPress::Sort(Sort::Name));
        assert_eq!((sorted.above, sorted.sort), (0, Sort::Name));
    }

    #[test]
    fn any_key_closes_the_help() {
        let help = Look::default().after(KeyPress::Help, 5, 10);
        assert!(help.help);
        assert_eq!(help.after(KeyPress::Sort(Sort::Cpu), 5, 10), Look::default());
    }
}
