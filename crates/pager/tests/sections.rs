//! Critical sections of rseq(2) over a sleep: every thread runs all the time, so that the one that
//! makes our calls may stand in one.

mod rig;

use kip_pager::proc::{Sets, Way};
use rig::{Rig, Torture, built, stopped};
use std::os::unix::fs::FileExt as _;
use std::process::Command;

// promise hibernation: a thread that is stopped in a critical section of rseq(2) goes on at its
//   abort address
#[test]
fn a_section_that_is_broken_off_is_aborted() {
    let end = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    end.as_file().set_len(4096).unwrap();
    let mut program = Torture::by(Command::new(built("rseq")).arg(end.path()));
    let mut rig = Rig::new();
    for round in 0..300 {
        let stopped = stopped(program.pid);
        let sets = if round % 2 == 0 { Sets::Memory } else { Sets::None };
        rig.proc.deflate(&stopped, Way { drop_files: true, ticks: false, sets, timers: false }).unwrap();
        rig.proc.wake(&[program.pid], "");
        stopped.go();
        // So that another thread uses each processor's counter in between.
        std::thread::sleep(std::time::Duration::from_millis(1 + round % 5));
    }
    end.as_file().write_all_at(&[1], 0).unwrap();
    assert_eq!(program.receive(), "ok");
}
