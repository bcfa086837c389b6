//! Limits that processes have used up, lifted while CRIU makes calls in them, and what the images
//! say of them.

use kip_checkpoint::set_limits;
use kip_clocks::tree::Tree;
use kip_criu_images::{CheckpointImageError, Images};
use kip_stop::limits::Lifted;

/// Lifts what the processes of a tree have nearly used up. What cannot be lifted CRIU may still do
/// without.
pub fn lift(tree: &Tree) -> Vec<(u32, Lifted)> {
    let lift = |pid: &u32| match Lifted::of(*pid, None) {
        Ok(lifted) => Some((*pid, lifted?)),
        Err(error) => {
            tracing::debug!(pid, %error, "limits stay as they are");
            None
        }
    };
    tree.pids.iter().filter_map(lift).collect()
}

/// Puts what the limits were into the images.
pub fn note(lifted: &[(u32, Lifted)], tree: &Tree, images: &mut Images) -> Result<(), CheckpointImageError> {
    for (pid, lifted) in lifted {
        let Some((inside, _)) = tree.threads.iter().find(|(_, tid)| *tid == pid) else { continue };
        let number = |limit: Option<u64>| limit.unwrap_or(u64::MAX);
        let before: Vec<_> = lifted.before().map(|(n, l)| (n, number(l.current), number(l.maximum))).collect();
        set_limits(images, *inside, &before)?;
    }
    Ok(())
}

/// What keeps CRIU from making calls in a process of a tree, if a dump failed for that.
pub fn used_up(tree: &Tree) -> Option<String> {
    tree.pids.iter().find_map(|pid| kip_stop::limits::used_up(*pid))
}
