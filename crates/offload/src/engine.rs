//! Which engine can read a generation: the one that wrote it, or a newer one. An older one may
//! misread what a newer one writes, and what an engine of another name writes only that engine
//! reads.

/// A generation must not be restored here.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the snapshot was made by {there}; this machine has {here}: install {there} or newer here, or wake the proc where it is"
)]
pub struct Unreadable {
    there: String,
    here: String,
}

fn parts(engine: &str) -> Option<(&str, Vec<u32>)> {
    let (name, version) = engine.rsplit_once(' ')?;
    let numbers = version.split('.').map(|number| number.parse().ok()).collect::<Option<_>>()?;
    Some((name, numbers))
}

/// Whether the engine `here` reads what `there` wrote, both as `criu 4.2.1`.
pub fn check(there: &str, here: &str) -> Result<(), Unreadable> {
    let reads = match (parts(there), parts(here)) {
        (Some((wrote, its)), Some((reads, own))) => wrote == reads && its <= own,
        _ => there == here,
    };
    if reads { Ok(()) } else { Err(Unreadable { there: there.to_owned(), here: here.to_owned() }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_or_a_newer_one_of_the_same_name_reads_it() {
        for there in ["criu 4.2.1", "criu 4.2", "criu 3.19.9", "criu 4.1.10"] {
            assert_eq!(check(there, "criu 4.2.1"), Ok(()), "{there}");
        }
        for there in ["criu 4.2.2", "criu 4.10", "criu 5.0", "dmtcp 3.0", "criu", "", "criu 4.2.1-rc1"] {
            let refused = check(there, "criu 4.2.1").unwrap_err().to_string();
            assert!(refused.contains("this machine has criu 4.2.1: install"), "{refused}");
        }
        assert_eq!(check("criu 4.2-rc1", "criu 4.2-rc1"), Ok(()));
    }
}
