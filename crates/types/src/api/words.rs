//! Closed sets of words that travel as texts, as the schemas of the API have them. No code branches
//! on them.

/// What wakes are counted by, [`super::WakesView`].
pub const TRIGGERS: &[&str] = &["tcp", "udp", "timer", "touch", "wake", "exec", "stop", "other"];

/// What a timer is that will wake a sleeper, [`super::NextWakeView`].
pub const TIMERS: &[&str] = &["timerfd", "POSIX timer", "interval timer", "time-out of a call", "it was at work"];

/// Parts of a sealed front, [`super::SectionView`].
pub const SECTIONS: &[&str] =
    &["manifest", "sets", "page table", "files", "metadata", "eager pages", "set pages", "end"];

#[cfg(test)]
mod tests {
    use crate::api::{CheckOperation, OwnFileKind, SocketFamily, SocketState};

    fn agrees(value: impl serde::Serialize + std::fmt::Display) {
        assert_eq!(serde_json::to_value(&value).unwrap(), value.to_string());
    }

    #[test]
    fn people_read_the_words_that_travel() {
        use {CheckOperation as C, OwnFileKind as O, SocketFamily as F, SocketState as S};
        [C::Start, C::Sleep, C::Wake].into_iter().for_each(agrees);
        [O::File, O::Link, O::Device, O::Fifo, O::Socket, O::Deleted, O::Replaced].into_iter().for_each(agrees);
        [F::Tcp, F::Udp, F::Unix, F::Netlink, F::Socket].into_iter().for_each(agrees);
        [S::Established, S::CloseWait, S::FinWait, S::SynSent, S::Listen, S::Closing, S::Flow]
            .into_iter()
            .for_each(agrees);
        assert_eq!(serde_json::from_str::<S>("\"of a newer Kip\"").unwrap(), S::Unknown);
    }
}
