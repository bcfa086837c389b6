//! How many more or fewer procs there should be. Pure.

use crate::load::Load;
use kip_types::scale::Scaling;
use std::time::{Duration, Instant};

/// A load that is high adds replicas once it has been for so long.
const HIGH_FOR: Duration = Duration::from_secs(2);
/// On average busy to this share is a high load.
const HIGH: f64 = 0.8;
/// What replicas are added for.
const WANTED: f64 = 0.6;
/// What would be left on average without one replica has to be below this.
const LOW: f64 = 0.4;

/// What a look has led to.
#[derive(Debug, Clone, PartialEq)]
pub enum Decision {
    /// Nothing.
    Stay,
    /// So many more, and why.
    Add(u32, String),
    /// One fewer, and why.
    Remove(String),
}

/// How the load has been.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Trend {
    /// High all the time since then.
    pub high_since: Option<Instant>,
    /// Low all the time since then.
    pub low_since: Option<Instant>,
}

/// What is to be done about those in rotation, of which there is at least one; `wants_more` is the
/// answer of the owner's probe. After a decision the load has to show anew.
pub fn decide(
    scaling: &Scaling,
    loads: &[Load],
    wants_more: Option<bool>,
    trend: &mut Trend,
    now: Instant,
) -> Decision {
    let count = loads.len() as u32;
    let (least, most) = (scaling.min.max(1), scaling.max);
    if count < least {
        return Decision::Add(least - count, format!("at least {least} are asked for"));
    }
    if count > most {
        return Decision::Remove(format!("at most {most} are asked for"));
    }
    let busy: f64 = loads.iter().map(|load| load.busy).sum();
    let queued: u32 = loads.iter().map(|load| load.queued).sum();
    let (average, waits) = (busy / f64::from(count), queued >= count);
    let high = average > HIGH || waits || wants_more == Some(true);
    let low =
        count > 1 && busy / f64::from(count.saturating_sub(1).max(1)) < LOW && queued == 0 && wants_more != Some(true);
    let since = |known: Option<Instant>, holds: bool| if holds { Some(known.unwrap_or(now)) } else { None };
    trend.high_since = since(trend.high_since, high);
    trend.low_since = since(trend.low_since, low);
    let lasts = |since: Option<Instant>, long: Duration| since.is_some_and(|since| now - since >= long);
    if lasts(trend.high_since, HIGH_FOR) && count < most {
        *trend = Trend::default();
        // Never more than twice as many at once: what is added has to show what it is good for.
        let wanted = (busy / WANTED).ceil() as u32;
        let more = wanted.saturating_sub(count).clamp(1, count).min(most - count);
        let why = match wants_more {
            Some(true) => "its probe asks for more".to_owned(),
            _ if waits && queued == 1 => "a connection waits to be accepted".to_owned(),
            _ if waits => format!("{queued} connections wait to be accepted"),
            _ => format!("{count} are busy to {:.0}%", average * 100.0),
        };
        return Decision::Add(more, why);
    }
    if lasts(trend.low_since, Duration::from_millis(scaling.calm_ms)) && count > least {
        *trend = Trend::default();
        return Decision::Remove(format!("{count} are busy to {:.0}%", average * 100.0));
    }
    Decision::Stay
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scaling(min: u32, max: u32) -> Scaling {
        Scaling { min, max, calm_ms: 10_000, ..Scaling::default() }
    }

    fn loads(busy: &[f64]) -> Vec<Load> {
        busy.iter().map(|busy| Load { busy: *busy, ..Load::default() }).collect()
    }

    /// The first decision but to stay, and after how many seconds, if all stays as it is.
    fn first(scaling: &Scaling, loads: &[Load], wants_more: Option<bool>) -> Option<(u64, Decision)> {
        let (mut trend, begun) = (Trend::default(), Instant::now());
        (0..100).find_map(|second| {
            let now = begun + Duration::from_secs(second);
            let decision = decide(scaling, loads, wants_more, &mut trend, now);
            (decision != Decision::Stay).then_some((second, decision))
        })
    }

    // promise scaling: load that lasts 2 s adds replicas, at most as many as there are
    #[test]
    fn load_that_lasts_adds() {
        let added = |busy: &[f64], max: u32| match first(&scaling(0, max), &loads(busy), None) {
            Some((2, Decision::Add(more, _))) => more,
            other => panic!("{other:?}"),
        };
        assert_eq!(added(&[1.0], 8), 1);
        assert_eq!(added(&[1.0; 4], 8), 3);
        assert_eq!(added(&[1.0; 4], 5), 1);
        assert_eq!(added(&[1.0, 1.0], 20), 2);
        assert_eq!(first(&scaling(0, 8), &loads(&[0.7, 0.8]), None), None);
        assert_eq!(first(&scaling(0, 2), &loads(&[1.0, 1.0]), None), None, "no more are allowed");
    }

    // promise scaling: connections that wait and the owner's probe add replicas, whatever the CPU
    //   does
    #[test]
    fn queues_and_probes_add() {
        let waiting = [Load { queued: 3, ..Load::default() }];
        let why = |decision| match decision {
            Some((2, Decision::Add(1, why))) => why,
            other => panic!("{other:?}"),
        };
        assert_eq!(why(first(&scaling(0, 8), &waiting, None)), "3 connections wait to be accepted");
        assert_eq!(why(first(&scaling(0, 8), &loads(&[0.0]), Some(true))), "its probe asks for more");
        assert_eq!(first(&scaling(0, 8), &loads(&[0.0]), Some(false)), None);
    }

    // promise scaling: one is taken away after a calm minute, if those that are left have room
    #[test]
    fn a_calm_time_takes_one_away() {
        let removed = |min: u32, busy: &[f64]| first(&scaling(min, 8), &loads(busy), None).map(|(at, _)| at);
        assert_eq!(removed(0, &[0.1, 0.1]), Some(10));
        assert_eq!(removed(0, &[0.0]), None, "the last one stays");
        assert_eq!(removed(2, &[0.0, 0.0]), None);
        assert_eq!(removed(0, &[0.3, 0.3]), None, "one alone would be busy to 60%");
    }

    // promise scaling: a load that comes and goes changes nothing
    #[test]
    fn what_does_not_last_changes_nothing() {
        let (mut trend, begun, scaling) = (Trend::default(), Instant::now(), scaling(0, 8));
        for second in 0..100 {
            let load = loads(if second % 2 == 0 { &[1.0, 1.0] } else { &[0.0, 0.0] });
            let now = begun + Duration::from_secs(second);
            assert_eq!(decide(&scaling, &load, None, &mut trend, now), Decision::Stay);
        }
    }

    #[test]
    fn bounds_hold_at_once() {
        assert!(matches!(first(&scaling(3, 8), &loads(&[0.0]), None), Some((0, Decision::Add(2, _)))));
        assert!(matches!(first(&scaling(0, 1), &loads(&[1.0, 1.0]), None), Some((0, Decision::Remove(_)))));
    }
}
