//! Which calls a proc may make: its owner says what its programs may do to the name tree, and
//! whether they may spawn procs. What is about the proc itself needs no leave.

use crate::home::RuntimeHome;
use crate::wire::{CallKind, FailureCode, RuntimeFailure};
use kip_types::spec::TreeAccess;

/// What a call needs.
fn needed(call: &CallKind) -> TreeAccess {
    match call {
        CallKind::Hello(_)
        | CallKind::Whoami(_)
        | CallKind::Spawn(_)
        | CallKind::Await(_)
        | CallKind::Started(_)
        | CallKind::Exited(_)
        | CallKind::Evict(_)
        | CallKind::Unwatch(_) => TreeAccess::None,
        CallKind::Stat(_) | CallKind::List(_) | CallKind::Get(_) | CallKind::Watch(_) | CallKind::Leases(_) => {
            TreeAccess::Read
        }
        CallKind::Put(_)
        | CallKind::Mkdir(_)
        | CallKind::Rm(_)
        | CallKind::Mv(_)
        | CallKind::Grant(_)
        | CallKind::Keep(_)
        | CallKind::Revoke(_) => TreeAccess::Write,
    }
}

/// Whether a call needs leave to spawn procs.
fn spawns(call: &CallKind) -> bool {
    match call {
        CallKind::Spawn(_) | CallKind::Evict(_) => true,
        // The proc's own eviction has no name.
        CallKind::Await(call) => !call.name.is_empty(),
        _ => false,
    }
}

/// Refuses a call that a proc may not make.
pub(crate) fn check(home: &dyn RuntimeHome, call: &CallKind) -> Result<(), RuntimeFailure> {
    if spawns(call) && !home.may_spawn() {
        let message =
            "the proc may not spawn procs, wait for them or evict them: its owner allows it by `kip run --spawn N`";
        return Err(RuntimeFailure::new(FailureCode::Denied, message));
    }
    check_tree(home.tree(), call)
}

fn check_tree(access: TreeAccess, call: &CallKind) -> Result<(), RuntimeFailure> {
    let needed = needed(call);
    if needed <= access {
        return Ok(());
    }
    let what = if needed == TreeAccess::Read { "read" } else { "change" };
    let message = format!("the proc may not {what} the name tree: its owner allows it by `kip run --tree {needed}`");
    Err(RuntimeFailure::new(FailureCode::Denied, message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{AwaitCall, GetCall, GrantCall, HelloCall, PutCall, WatchCall, WhoamiCall};

    #[test]
    fn spawning_needs_leave_and_what_is_about_the_proc_itself_does_not() {
        let child = AwaitCall { name: "child".to_owned(), moment: 1 };
        assert!(spawns(&CallKind::Await(child)) && !spawns(&CallKind::Await(AwaitCall::default())));
        assert!(!spawns(&CallKind::Whoami(WhoamiCall::default())));
    }

    // promise runtime: a proc reads the name tree only with `--tree read`, changes it and has
    //   leases only with `--tree write`; without either it has its identity alone
    // held by: this, `tests/test_runtime.py::test_access_to_the_tree`
    #[test]
    fn each_call_needs_its_access() {
        let calls = [
            (CallKind::Hello(HelloCall::default()), TreeAccess::None),
            (CallKind::Whoami(WhoamiCall::default()), TreeAccess::None),
            (CallKind::Get(GetCall::default()), TreeAccess::Read),
            (CallKind::Watch(WatchCall::default()), TreeAccess::Read),
            (CallKind::Put(PutCall::default()), TreeAccess::Write),
            (CallKind::Grant(GrantCall::default()), TreeAccess::Write),
        ];
        for (call, needed) in calls {
            for access in [TreeAccess::None, TreeAccess::Read, TreeAccess::Write] {
                match check_tree(access, &call) {
                    Ok(()) => assert!(access >= needed, "{call:?} with {access}"),
                    Err(failure) => {
                        assert!(access < needed && failure.code() == FailureCode::Denied, "{call:?} with {access}");
                        assert!(failure.message.ends_with(&format!("`kip run --tree {needed}`")), "{failure:?}");
                    }
                }
            }
        }
    }
}
