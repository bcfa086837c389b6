//! What a process opens and writes of proc(5) once all processes are there.

use super::files::ProcessFile;
use super::layout::{Span, Writer};
use kip_criu_images::Message;
use kip_criu_images::fields::task_core_entry;

/// The score that this process has, and each that the launcher starts: proc_pid_oom_score_adj(5).
pub(super) fn usual_oom_score() -> i32 {
    let text = std::fs::read_to_string("/proc/self/oom_score_adj").unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

/// The score of a process that has set its own.
pub(super) fn own_oom_score(tc: &Message) -> Option<i32> {
    let score = tc.varint(task_core_entry::OOM_SCORE_ADJ)? as i32;
    (score != usual_oom_score()).then_some(score)
}

/// What a process writes about itself, as a list of `struct setting`. Written from outside the
/// score would be the lowest that the program may give itself afterwards.
pub(super) fn own_settings(writer: &mut Writer, tc: &Message) -> Span {
    let one = |score: i32| {
        let text = score.to_string();
        let (path, at) = (writer.string("/proc/self/oom_score_adj"), writer.bytes(text.as_bytes()));
        vec![path, at, text.len() as u64]
    };
    let all: Vec<_> = own_oom_score(tc).map(one).into_iter().collect();
    writer.list(&all)
}

/// A pidfd, or a file of proc(5).
pub(super) struct OfProcess {
    pub(super) number: u64,
    pub(super) process: u64,
    pub(super) flags: u64,
    pub(super) descriptor_flags: u64,
    pub(super) gone: bool,
    pub(super) file: Option<ProcessFile>,
}

impl OfProcess {
    /// `struct of_process`.
    pub(super) fn write(&self, writer: &mut Writer) -> Vec<u64> {
        let path = self.file.as_ref().map_or(0, |file| writer.string(&file.path));
        let position = self.file.as_ref().map_or(0, |file| file.position);
        let gone = u64::from(self.gone);
        vec![self.number, self.process, self.flags, self.descriptor_flags, gone, path, position]
    }
}
