//! System call filters, seccomp(2): the restorer sets the sandbox's, and, since it cannot finish
//! under those of a program, whatever they forbid, the tracer has each thread set the program's as
//! its last act, with filters suspended.

use super::layout::{PLAN_AT, Span, Writer};
use super::tasks::one;
use super::{OwnFilter, PlanError, unsupported};
use kip_criu_images::codes::seccomp;
use kip_criu_images::fields::{core_entry, creds_entry, seccomp_entry, seccomp_filter, thread_core_entry};
use kip_criu_images::processes::filter_chain;
use kip_criu_images::{Images, Message};
use std::collections::{BTreeMap, BTreeSet};

/// The program's own by thread, in the order in which they are set.
pub(super) type OwnFilters = BTreeMap<u32, Vec<OwnFilter>>;

/// The filters of one process.
#[derive(Debug, Default)]
pub(super) struct ProcessFilters {
    /// `struct filter`: the sandbox's, which all threads have below their own.
    pub sandbox: Span,
    /// For the tracer.
    pub own: OwnFilters,
}

/// CAP_SYS_ADMIN of capabilities(7).
const SYS_ADMIN: u64 = 1 << 21;

/// Those of all processes.
#[derive(Debug)]
pub(super) struct Filters(Vec<Message>);

impl Filters {
    pub(super) fn read(images: &Images) -> Result<Filters, PlanError> {
        if images.bytes("seccomp.img").is_none() {
            return Ok(Filters(Vec::new()));
        }
        Ok(Filters(one(images, "seccomp.img")?.messages(seccomp_entry::SECCOMP_FILTERS)?))
    }

    /// The filters of a process's threads, the leader first.
    pub(super) fn of_process(
        &self,
        writer: &mut Writer,
        threads: &[(u32, Message)],
    ) -> Result<ProcessFilters, PlanError> {
        let mut found = ProcessFilters::default();
        let mut lowest = BTreeSet::new();
        let mut of_all = false;
        for (id, core) in threads {
            if of_all {
                break;
            }
            let thread = core.message(core_entry::THREAD_CORE)?.unwrap_or_default();
            let (chain, is_of_all) = self.of_thread(&thread)?;
            of_all = is_of_all;
            lowest.insert(chain.first().map(|filter| code_of(filter)));
            let own = chain.get(1..).unwrap_or_default();
            if own.is_empty() {
                continue;
            }
            let creds = thread.message(thread_core_entry::CREDS)?.unwrap_or_default();
            let effective = creds.varints(creds_entry::CAP_EFF)?.first().copied().unwrap_or_default();
            if creds.number(creds_entry::NO_NEW_PRIVS) == 0 && effective & SYS_ADMIN == 0 {
                return unsupported("system call filters of a program that may not set them any more");
            }
            let mut program = |filter: &&Message| {
                let (code, flags) = code_of(filter);
                let at = writer.bytes(code);
                // `struct sock_fprog`
                let program = PLAN_AT + writer.words(&[code.len() as u64 / 8, PLAN_AT + at]);
                OwnFilter { program, flags: flags | if of_all { seccomp::TSYNC } else { 0 } }
            };
            found.own.insert(*id, own.iter().map(&mut program).collect());
        }
        match (lowest.len(), lowest.first()) {
            (1, Some(None)) => {}
            (1, Some(Some((code, flags)))) => {
                let at = writer.bytes(code);
                found.sandbox = writer.list(&[vec![at, code.len() as u64 / 8, *flags]]);
            }
            _ => return unsupported("threads with different system call filters below their own"),
        }
        Ok(found)
    }

    /// Those of a thread as they are set, the oldest first, and whether all threads of its process
    /// have them, which CRIU says by TSYNC at the leader's; it leaves the others' out.
    fn of_thread(&self, thread: &Message) -> Result<(Vec<&Message>, bool), PlanError> {
        let chain = match thread.number(thread_core_entry::SECCOMP_MODE) {
            seccomp::DISABLED => Some(Vec::new()),
            seccomp::FILTER => filter_chain(&self.0, thread.number(thread_core_entry::SECCOMP_FILTER)),
            _ => return unsupported("system calls that prctl(2) PR_SET_SECCOMP restricts to four"),
        };
        let Some(chain) = chain else { return unsupported("a chain of system call filters that has no end") };
        let of_all = chain.iter().any(|filter| filter.number(seccomp_filter::FLAGS) & seccomp::TSYNC != 0);
        Ok((chain, of_all))
    }
}

/// A filter's instructions, and its flags as seccomp(2) takes them.
fn code_of(filter: &Message) -> (&[u8], u64) {
    let flags = filter.number(seccomp_filter::FLAGS) & !seccomp::TSYNC;
    (filter.bytes(seccomp_filter::FILTER).unwrap_or_default(), flags)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kip_criu_images::FieldValue;

    fn message<const N: usize>(fields: [(u32, FieldValue); N]) -> Message {
        Message(fields.into())
    }

    fn filter(code: u8, previous: Option<u64>, flags: u64) -> Message {
        let mut all = vec![
            (seccomp_filter::FILTER, FieldValue::Bytes(vec![code; 8])),
            (seccomp_filter::FLAGS, FieldValue::Varint(flags)),
        ];
        all.extend(previous.map(|index| (seccomp_filter::PREV, FieldValue::Varint(index))));
        Message(all)
    }

    /// A thread that may set filters no more unless `no_new_privs`.
    fn thread(mode: u64, last: u64, no_new_privs: u64) -> Message {
        let creds = message([
            (creds_entry::CAP_EFF, FieldValue::Varint(1 << 20)),
            (creds_entry::NO_NEW_PRIVS, FieldValue::Varint(no_new_privs)),
        ]);
        let own = message([
            (thread_core_entry::SECCOMP_MODE, FieldValue::Varint(mode)),
            (thread_core_entry::SECCOMP_FILTER, FieldValue::Varint(last)),
            (thread_core_entry::CREDS, FieldValue::Bytes(creds.encode())),
        ]);
        message([(core_entry::THREAD_CORE, FieldValue::Bytes(own.encode()))])
    }

    /// How many are the sandbox's, and the flags of the others by thread.
    type Told = (usize, Vec<(u32, Vec<u64>)>);

    fn of(filters: &[Message], threads: &[Message]) -> Result<Told, String> {
        let threads: Vec<_> = (2..).zip(threads.iter().cloned()).collect();
        let mut writer = Writer::new();
        let found = Filters(filters.to_vec()).of_process(&mut writer, &threads).map_err(|e| e.to_string())?;
        let flags = |own: Vec<OwnFilter>| own.iter().map(|filter| filter.flags).collect();
        Ok((found.sandbox.1 as usize, found.own.into_iter().map(|(id, own)| (id, flags(own))).collect()))
    }

    const FILTER: u64 = seccomp::FILTER;

    #[test]
    fn the_sandbox_s_filter_is_the_restorer_s_and_all_others_the_tracer_s() {
        // The sandbox's, then 1, then 2 with SECCOMP_FILTER_FLAG_LOG.
        let all = [filter(0, Some(1), 0), filter(1, Some(2), 0), filter(2, None, 2), filter(0, None, 0)];
        let alone = of(&all, &[thread(FILTER, 3, 0)]);
        assert_eq!(alone, Ok((1, vec![])));
        let apart = of(&all, &[thread(FILTER, 3, 0), thread(FILTER, 0, 1)]);
        assert_eq!(apart, Ok((1, vec![(3, vec![0, 2])])));
        let shared = [filter(0, Some(1), seccomp::TSYNC), filter(1, None, seccomp::TSYNC)];
        let both = of(&shared, &[thread(FILTER, 0, 1), thread(seccomp::DISABLED, 0, 1)]);
        assert_eq!(both, Ok((1, vec![(2, vec![seccomp::TSYNC])])), "the leader sets it for both");
        assert_eq!(of(&[], &[thread(seccomp::DISABLED, 0, 0)]), Ok((0, vec![])));
    }

    #[test]
    fn what_cannot_be_set_again_is_refused() {
        let all = [filter(0, Some(1), 0), filter(1, None, 0), filter(2, Some(2), 0), filter(3, Some(9), 0)];
        for (threads, why) in [
            (vec![thread(FILTER, 0, 0)], "may not set them any more"),
            (vec![thread(FILTER, 1, 0), thread(FILTER, 0, 1)], "below their own"),
            (vec![thread(FILTER, 2, 1)], "no end"),
            (vec![thread(FILTER, 3, 1)], "no end"),
            (vec![thread(FILTER, 7, 1)], "no end"),
            (vec![thread(1, 0, 1)], "restricts to four"),
        ] {
            let refused = of(&all, &threads).unwrap_err();
            assert!(refused.contains(why), "{refused}");
        }
    }
}
