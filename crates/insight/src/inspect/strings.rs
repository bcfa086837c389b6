//! Arguments and environments out of pages of memory, as the kernel tells them in /proc/PID/cmdline
//! and environ.

use super::{Page, Pages};
use kip_criu_images::inspect::{ImageProcess, StringRanges};
use kip_snapshot::pages::PAGE;
use std::ops::Range;

const PAGE64: u64 = PAGE as u64;
/// Most bytes of each that are read: execve(2) takes 6 MiB at most of both, and a program may say
/// anything.
const MOST: u64 = 8 << 20;

fn bounded(range: &Range<u64>) -> Range<u64> {
    range.start..range.end.clamp(range.start, range.start.saturating_add(MOST))
}

/// The pages that are needed.
pub(super) fn wanted(process: &ImageProcess) -> Vec<Page> {
    let StringRanges { arguments, environment } = &process.strings;
    let mut pages: Vec<Page> = Vec::new();
    for range in [bounded(arguments), bounded(environment)] {
        let first = range.start & !(PAGE64 - 1);
        pages.extend((first..range.end).step_by(PAGE).filter(|_| !range.is_empty()).map(|page| (process.pid, page)));
    }
    pages
}

/// Command line and environment.
///
/// # Errors
/// A page cannot be read, and why.
pub(super) fn read(process: &ImageProcess, pages: &Pages) -> Result<(Vec<String>, Vec<String>), String> {
    let StringRanges { arguments, environment } = &process.strings;
    let mut command = bytes(process.pid, &bounded(arguments), pages)?;
    let environ = bytes(process.pid, &bounded(environment), pages)?;
    // A program has written a line of its own there, maybe on into its environment:
    // setproctitle(3).
    if command.last().is_some_and(|last| *last != 0) {
        if environment.start == arguments.end {
            command.extend(&environ);
        }
        let end = command.iter().position(|byte| *byte == 0).unwrap_or(command.len());
        command.truncate(end);
    }
    let mut command = texts(&command);
    // A program that writes a shorter line than there was room fills the rest with zeros.
    while command.last().is_some_and(String::is_empty) {
        command.pop();
    }
    let env = texts(&environ).into_iter().filter(|text| !text.is_empty()).collect();
    Ok((command, env))
}

fn texts(bytes: &[u8]) -> Vec<String> {
    if bytes.is_empty() {
        return Vec::new();
    }
    let bytes = bytes.strip_suffix(&[0]).unwrap_or(bytes);
    bytes.split(|byte| *byte == 0).map(|text| String::from_utf8_lossy(text).into_owned()).collect()
}

fn bytes(pid: u32, range: &Range<u64>, pages: &Pages) -> Result<Vec<u8>, String> {
    let mut found = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let page = at & !(PAGE64 - 1);
        let end = range.end.min(page + PAGE64);
        match pages.get(&(pid, page)) {
            Some(Ok(bytes)) => found.extend(&bytes[(at - page) as usize..(end - page) as usize]),
            Some(Err(why)) => return Err(format!("page {page:x} of its process {pid}: {why}")),
            // In no run: no process ever wrote there.
            None => found.resize(found.len() + (end - at) as usize, 0),
        }
        at = end;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(arguments: Range<u64>, environment: Range<u64>) -> ImageProcess {
        ImageProcess { pid: 2, strings: StringRanges { arguments, environment }, ..ImageProcess::default() }
    }

    /// Two pages from 0x1000 on, with some text behind `at`.
    fn pages(at: u64, text: &[u8]) -> Pages {
        let mut memory = vec![0; 2 * PAGE];
        memory[(at - 0x1000) as usize..][..text.len()].copy_from_slice(text);
        (0..2).map(|n| ((2, 0x1000 + n * PAGE64), Ok(memory[n as usize * PAGE..][..PAGE].to_vec()))).collect()
    }

    #[test]
    fn arguments_and_environment_lie_across_pages() {
        let text = b"redis\0--save\0\0--port\x001\0A=b=c\0E=\0\xff\0";
        let (at, arguments) = (0x1ff0, 23);
        let of = process(at..at + arguments, at + arguments..at + text.len() as u64);
        assert_eq!(wanted(&of), [(2, 0x1000), (2, 0x2000), (2, 0x2000)]);
        let (command, env) = read(&of, &pages(at, text)).unwrap();
        assert_eq!(command, ["redis", "--save", "", "--port", "1"]);
        assert_eq!(env, ["A=b=c", "E=", "\u{fffd}"]);
    }

    #[test]
    fn a_title_is_one_line_and_may_go_on_into_the_environment() {
        // The arguments were ten bytes.
        let of = process(0x1000..0x100a, 0x100a..0x1020);
        assert_eq!(read(&of, &pages(0x1000, b"nginx: master process")).unwrap().0, ["nginx: master process"]);
        assert_eq!(read(&of, &pages(0x1000, b"nginx: x\0\0")).unwrap().0, ["nginx: x"], "filled with zeros");
        let apart = process(0x1000..0x100a, 0x1100..0x1120);
        assert_eq!(read(&apart, &pages(0x1000, b"nginx: master process")).unwrap().0, ["nginx: mas"]);
    }

    #[test]
    fn what_cannot_be_read_is_said_and_what_is_nowhere_is_zeros() {
        let of = process(0x1000..0x1008, 0..0);
        let mut some = Pages::new();
        assert_eq!(read(&of, &some).unwrap(), (vec![], vec![]));
        some.insert((2, 0x1000), Err("the store is gone".to_owned()));
        assert_eq!(read(&of, &some).unwrap_err(), "page 1000 of its process 2: the store is gone");
        let huge = process(0..u64::MAX - 1, Range { start: 5, end: 3 });
        assert_eq!(wanted(&huge).len() as u64, MOST / PAGE64, "a program may say anything");
    }
}
