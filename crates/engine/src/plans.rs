//! The plan of a proc's next wake by our own restorer, made ahead of it; and custody of its sockets
//! until then.

use crate::fd_store::key;
use crate::host::Proc;
use kip_checkpoint::plan::{self, Plan, PlanError, Wish};
use kip_criu_images::Images;
use kip_net::custody;
use kip_records::body::Body;
use kip_snapshot::pages::PageMap;
use kip_types::{Generation, Lazy, chain};
use std::sync::atomic::Ordering;

/// So much memory that can come later is not read before the program runs, bytes: reading it takes
/// longer than the pager needs to take it up.
const LAZY_FROM: u64 = 8 << 20;

/// Makes the plan of the next wake, ahead of it, of a generation on disk. Without one CRIU does the
/// wake.
pub fn plan_wake(proc: &Proc, generation: Generation, body: &Body) {
    if let Some(plan) = compile_plan(proc, generation, body) {
        save_plan(proc, generation, &plan);
    }
}

/// The same of one whose images are in memory.
pub fn plan_parked(proc: &Proc, generation: Generation, images: &Images, pages: &PageMap, body: &Body) {
    if proc.shared.only_criu.load(Ordering::Relaxed) {
        return;
    }
    if let Some(plan) = any_plan(proc, images, pages, body) {
        save_plan(proc, generation, &plan);
    }
}

/// Keeps the plan beside its generation; without it the next wake makes one.
pub fn save_plan(proc: &Proc, generation: Generation, plan: &Plan) {
    if let Err(e) = plan.save(&kip_snapshot::path_of(&proc.dir, generation)) {
        tracing::warn!(proc = %proc.name, error = chain(&e), "no plan of the next wake");
    }
}

/// The plan of the next wake, if there can be one. Only reads.
pub fn compile_plan(proc: &Proc, generation: Generation, body: &Body) -> Option<Plan> {
    if proc.shared.only_criu.load(Ordering::Relaxed) {
        return None;
    }
    let directory = kip_snapshot::path_of(&proc.dir, generation);
    let pages = PageMap::load(&directory).map_err(|e| chain(&e));
    let read = pages.and_then(|pages| Ok((pages, Images::read(&directory).map_err(|e| chain(&e))?)));
    match read {
        Ok((pages, images)) => any_plan(proc, &images, &pages, body),
        Err(error) => {
            tracing::warn!(proc = %proc.name, error, "no plan of the next wake");
            None
        }
    }
}

/// The plan by which such images are restored, if there can be one; why not is logged.
fn any_plan(proc: &Proc, images: &Images, pages: &PageMap, body: &Body) -> Option<Plan> {
    match plan_of(proc, images, pages, body) {
        Ok(plan) => return Some(plan),
        Err(PlanError::Unsupported { what }) => {
            tracing::info!(proc = %proc.name, what, "CRIU will do the next wake");
        }
        Err(e) => tracing::warn!(proc = %proc.name, error = chain(&e), "no plan of the next wake"),
    }
    None
}

/// The plan by which such images are restored.
///
/// # Errors
/// There can be none, or the images are damaged.
pub fn plan_of(proc: &Proc, images: &Images, pages: &PageMap, body: &Body) -> Result<Plan, PlanError> {
    /// The first process that pid 1 makes.
    const PROGRAM: u32 = 2;
    let lazy_from = match proc.spec().timing.lazy {
        // What is still in a store has a long way.
        Lazy::Auto if pages.files.iter().any(|file| file.remote.is_some()) => 1,
        Lazy::Auto => LAZY_FROM,
        Lazy::On => 0,
        Lazy::Off => u64::MAX,
    };
    let (clocks, unreported, init) = (&body.clocks, &body.unreported, kip_sandbox::init::PATH);
    let terminals = body.terminals.as_ref().map_or(&[][..], |terminals| &terminals.controlled);
    plan::compile(images, &Wish { clocks, unreported, terminals, pages, lazy_from, init, program: PROGRAM })
}

/// Makes live sockets without a program comfortable: see [`kip_net::custody`].
pub fn take_custody(proc: &Proc, body: &Body) {
    for socket in &body.sockets {
        let Some(fd) = proc.fd_store.get(&format!("{}{}", key::SOCKET, socket.inode)) else {
            continue;
        };
        let held = fd.try_clone().map_err(|e| e.to_string());
        let held = held.and_then(|fd| custody::hold(fd, &socket.options).map_err(|e| chain(&e)));
        if let Err(e) = held {
            tracing::warn!(proc = %proc.name, inode = socket.inode, error = e, "a socket could not be taken into custody");
        }
    }
}
