//! A picture of procs as lines of a screen. Pure.

use super::compare::{TIERS, tier_word};
use crate::text::{bytes, micros, millis, one_line, short, utc};
use kip_types::api::{CacheView, RoomView, TopProc, TopView};

const HEAD: [&str; 10] = ["NAME", "STATE", "TIER", "MEMORY", "SAVED", "IDLE", "CPU%", "WAKES", "LAST-WAKE", "TRIGGER"];
/// Columns of numbers, which end at the same place.
const NUMBERS: std::ops::RangeInclusive<usize> = 3..=7;
/// Names are cut first, down to this; then whatever is to the right.
const SHORTEST_NAME: usize = 12;
const SHORTEST_TRIGGER: usize = 8;
const GAP: usize = 2;

/// What there is room for; none for as much as there is.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    pub rows: Option<usize>,
    pub columns: Option<usize>,
}

/// Whether lines may have control codes for how they look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    Plain,
    Highlighted,
}

/// Two lines about all, an empty one, titles, and a line for each proc as far as there is room.
pub fn lines(view: &TopView, size: Size, style: Style) -> Vec<String> {
    let width = size.columns.unwrap_or(usize::MAX);
    let mut lines: Vec<String> = header(view).iter().map(|line| cut(line, width)).collect();
    lines.push(String::new());
    let mut table = table(view, width);
    if style == Style::Highlighted {
        // As wide as the screen, so that the bar has no end.
        table[0] = format!("\x1b[7m{:<width$}\x1b[0m", table[0], width = size.columns.unwrap_or(0));
    }
    let room = size.rows.map_or(usize::MAX, |rows| rows.saturating_sub(lines.len()));
    if table.len() > room {
        let hidden = table.len() - room + 1;
        table.truncate(room.saturating_sub(1));
        table.push(cut(&format!("… and {hidden} more"), width));
    }
    lines.extend(table);
    lines.truncate(size.rows.unwrap_or(usize::MAX));
    lines
}

fn header(view: &TopView) -> [String; 2] {
    let count = |tier: &&str| format!("{} {tier}", view.tiers.get(*tier).copied().unwrap_or(0));
    let tiers: Vec<String> = TIERS.iter().map(count).collect();
    let time = utc(view.at_ms);
    [
        format!("kip top  {} UTC  procs {}: {}", &time[11..19], view.procs.len(), tiers.join(", ")),
        format!(
            "memory held {}, saved {}{}; {} wakes in the last minute",
            bytes(view.held_bytes),
            bytes(view.saved_bytes),
            view.room.as_ref().map(room).unwrap_or_default(),
            view.wakes_last_minute
        ) + &view.cache.as_ref().map(cache).unwrap_or_default(),
    ]
}

/// What is kept here of the store.
fn cache(cache: &CacheView) -> String {
    format!("; cache {} of {}", bytes(cache.bytes), bytes(cache.limit_bytes))
}

/// How full memory is, and the marks.
fn room(room: &RoomView) -> String {
    let [used, limit, low, high] = [room.used_bytes, room.limit_bytes, room.low_bytes, room.high_bytes].map(bytes);
    format!(", used {used} of {limit} (low {low}, high {high})")
}

/// Titles and a line for each proc, none longer than `width`.
fn table(view: &TopView, width: usize) -> Vec<String> {
    let mut rows = vec![HEAD.map(str::to_owned)];
    rows.extend(view.procs.iter().map(|proc| cells(proc, view.at_ms)));
    let mut widths = [0; HEAD.len()];
    for row in &rows {
        for (longest, cell) in widths.iter_mut().zip(row) {
            *longest = (*longest).max(cell.chars().count());
        }
    }
    let all = |widths: &[usize; HEAD.len()]| widths.iter().sum::<usize>() + GAP * (HEAD.len() - 1);
    for (column, shortest) in [(HEAD.len() - 1, SHORTEST_TRIGGER), (0, SHORTEST_NAME)] {
        let over = all(&widths).saturating_sub(width);
        widths[column] -= over.min(widths[column].saturating_sub(shortest));
    }
    rows.iter().map(|row| cut(&line(row, &widths), width)).collect()
}

fn line(row: &[String; HEAD.len()], widths: &[usize; HEAD.len()]) -> String {
    let cell = |(n, (cell, width)): (usize, (&String, &usize))| {
        let cell = cut(cell, *width);
        if NUMBERS.contains(&n) { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
    };
    let cells: Vec<String> = row.iter().zip(widths).enumerate().map(cell).collect();
    cells.join(&" ".repeat(GAP)).trim_end().to_owned()
}

fn cells(proc: &TopProc, now_ms: u64) -> [String; HEAD.len()] {
    let dash = || "-".to_owned();
    let last_wake = proc.last_wake_us.zip(proc.last_wake_at_ms);
    let ago = |at_ms: u64| millis(now_ms.saturating_sub(at_ms));
    [
        proc.name.to_string(),
        proc.state.to_string(),
        if proc.tier.is_some() { tier_word(proc.tier) } else { dash() },
        if proc.memory_bytes == 0 { dash() } else { bytes(proc.memory_bytes) },
        proc.saved_bytes.map_or_else(dash, bytes),
        proc.idle_ms.map_or_else(dash, millis),
        proc.cpu_percent.map_or_else(dash, |percent| format!("{percent:.1}")),
        proc.wakes.to_string(),
        last_wake.map_or_else(dash, |(us, at_ms)| format!("{}, {} ago", micros(us), ago(at_ms))),
        proc.last_trigger.as_deref().map_or_else(dash, one_line),
    ]
}

fn cut(text: &str, width: usize) -> String {
    if width == 0 { String::new() } else { short(text, width) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kip_types::lifecycle::{StateName, Tier};

    fn proc(name: &str, tier: Option<Tier>) -> TopProc {
        TopProc {
            name: name.parse().unwrap(),
            state: if tier == Some(Tier::Hot) { StateName::Running } else { StateName::Parked },
            tier,
            memory_bytes: if tier == Some(Tier::Hot) { 3 << 20 } else { 0 },
            saved_bytes: (tier == Some(Tier::Parked)).then_some(5 << 20),
            idle_ms: (tier == Some(Tier::Hot)).then_some(1500),
            cpu_percent: (tier == Some(Tier::Hot)).then_some(12.34),
            wakes: 7,
            last_wake_us: Some(7500),
            last_wake_at_ms: Some(0),
            last_trigger: Some("tcp 0.0.0.0:80 (connection)".to_owned()),
        }
    }

    fn view(procs: Vec<TopProc>) -> TopView {
        let tiers = [("hot", 1), ("parked", 1)].map(|(tier, n)| (tier.to_owned(), n)).into();
        let (held_bytes, saved_bytes) = (3 << 20, 5 << 20);
        TopView { at_ms: 180_000, tiers, held_bytes, saved_bytes, wakes_last_minute: 2, room: None, cache: None, procs }
    }

    fn two() -> TopView {
        view(vec![proc("web", Some(Tier::Hot)), proc("a-sleeper", Some(Tier::Parked))])
    }

    fn plain(view: &TopView, rows: usize, columns: usize) -> Vec<String> {
        lines(view, Size { rows: Some(rows), columns: Some(columns) }, Style::Plain)
    }

    #[test]
    fn a_screen_has_sums_and_a_line_for_each_proc() {
        let expected = "\
kip top  00:03:00 UTC  procs 2: 1 hot, 0 hibernated, 1 parked, 0 archived, 0 stopped
memory held 3.0M, saved 5.0M; 2 wakes in the last minute

NAME       STATE    TIER    MEMORY  SAVED  IDLE  CPU%  WAKES  LAST-WAKE      TRIGGER
web        running  hot       3.0M      -  1.5s  12.3      7  7.5ms, 3m ago  tcp 0.0.0.0:80 (connection)
a-sleeper  parked   parked       -   5.0M     -     -      7  7.5ms, 3m ago  tcp 0.0.0.0:80 (connection)";
        let all = lines(&two(), Size { rows: None, columns: None }, Style::Plain);
        assert_eq!(all.join("\n"), expected);
        assert_eq!(plain(&two(), 24, 200), all);
        let [used_bytes, limit_bytes, high_bytes, low_bytes] = [40, 100, 90, 80].map(|mib: u64| mib << 20);
        let room = Some(RoomView { used_bytes, limit_bytes, high_bytes, low_bytes, set_bytes: 0 });
        let second = &plain(&TopView { room, ..two() }, 24, 200)[1];
        assert!(
            second.starts_with("memory held 3.0M, saved 5.0M, used 40.0M of 100.0M (low 80.0M, high 90.0M); 2 wakes")
        );
        assert_eq!(lines(&view(Vec::new()), Size { rows: None, columns: None }, Style::Plain).len(), 4);
    }

    #[test]
    fn triggers_are_cut_and_then_names() {
        let long = view(vec![proc(&"n".repeat(40), Some(Tier::Hot))]);
        let row = &plain(&long, 24, 110)[4];
        assert!(row.starts_with(&"n".repeat(33)) && row.ends_with("  tcp 0.0…"), "{row}");
        let row = &plain(&long, 24, 85)[4];
        assert!(row.starts_with("nnnnnnnnnnn…  running  hot "), "{row}");
        for columns in 0..150 {
            for line in plain(&long, 24, columns) {
                assert!(line.chars().count() <= columns, "{columns}: {line}");
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_counted() {
        let many = view((0..50).map(|n| proc(&format!("p{n}"), Some(Tier::Hot))).collect());
        let screen = plain(&many, 10, 200);
        assert_eq!((screen.len(), screen[9].as_str()), (10, "… and 45 more"));
        assert!(screen[8].starts_with("p4 "), "{screen:?}");
        for rows in 0..60 {
            assert!(plain(&many, rows, 80).len() <= rows);
        }
        assert!(plain(&many, 54, 200)[53].starts_with("p49"), "all fit");
    }

    #[test]
    fn only_a_highlighted_screen_has_control_codes() {
        let has = |style| lines(&two(), Size { rows: Some(24), columns: Some(80) }, style).concat().contains('\x1b');
        assert!(has(Style::Highlighted) && !has(Style::Plain));
    }
}
