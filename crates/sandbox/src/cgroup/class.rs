//! How a group shares CPUs with those beside it.

use super::{Cgroup, CgroupError};
use kip_types::spec::ProcClass;

impl Cgroup {
    /// Sets its class. A group of the class `be` runs only on CPUs that no other wants (`cpu.idle`,
    /// Linux 5.15, which is its weight, too); where the kernel does not know that, it has the
    /// smallest weight. Written only if it is another than before.
    pub(super) fn set_class(&self, class: ProcClass) -> Result<(), CgroupError> {
        let is_idle = class == ProcClass::Be;
        if let Ok(was) = self.number("cpu", "cpu.idle") {
            return if (was == 1) == is_idle { Ok(()) } else { self.write("cpu", "cpu.idle", u8::from(is_idle)) };
        }
        let (name, usual, least) = if self.v2 { ("cpu.weight", 100, 1) } else { ("cpu.shares", 1024, 2) };
        let weight = if is_idle { least } else { usual };
        // A kernel that does not schedule groups has no such file.
        match self.number("cpu", name) {
            Ok(was) if was != weight => self.write("cpu", name, weight),
            _ => Ok(()),
        }
    }
}
