//! What processes hold in memory: smaps_rollup of proc_pid_smaps(5).

use std::fs;

/// Memory of processes, bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Resident set.
    pub resident: u64,
    /// Proportional set.
    pub proportional: u64,
    /// Of the proportional set anonymous and shared memory: all but pages of files, which the
    /// kernel keeps by itself.
    pub own: u64,
    /// Swapped by the kernel.
    pub swapped: u64,
}

/// Memory of the processes. One that has ended has none.
pub fn memory(pids: &[u32]) -> MemoryUse {
    let mut sum = MemoryUse::default();
    for pid in pids {
        let Ok(text) = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")) else { continue };
        let field = |name: &str| -> u64 {
            let line = text.lines().find(|l| l.starts_with(name));
            line.and_then(|l| l.split_whitespace().nth(1)?.parse::<u64>().ok()).unwrap_or(0) * 1024
        };
        sum.resident += field("Rss:");
        sum.proportional += field("Pss:");
        sum.own += field("Pss_Anon:") + field("Pss_Shmem:");
        sum.swapped += field("Swap:");
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_files_are_no_memory_of_its_own() {
        let own = vec![1u8; 4 << 20];
        let memory = memory(&[std::process::id()]);
        assert!(memory.own >= own.len() as u64 && memory.own < memory.proportional, "{memory:?}");
        assert!(memory.proportional <= memory.resident, "{memory:?}");
    }
}
