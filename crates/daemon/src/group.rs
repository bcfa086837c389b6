//! The group whose members may use the API.

use std::io;

/// There is no such group.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// The groups of this machine.
    #[error("cannot read /etc/group")]
    Read(#[source] io::Error),
    /// A name that is not among them.
    #[error("there is no group {0} in /etc/group: give its number")]
    Unknown(String),
}

/// The number of a group that is given by number or by its name in /etc/group, group(5).
pub(crate) fn id_of(group: &str) -> Result<u32, GroupError> {
    if let Ok(number) = group.parse() {
        return Ok(number);
    }
    let file = std::fs::read_to_string("/etc/group").map_err(GroupError::Read)?;
    id_in(&file, group).ok_or_else(|| GroupError::Unknown(group.to_owned()))
}

fn id_in(file: &str, group: &str) -> Option<u32> {
    file.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(group)).then(|| fields.nth(1)?.parse().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_found_by_name() {
        let file = "root:x:0:\ndocker:x:998:alice,bob\nbroken\nbroken2:x:much:\n";
        assert_eq!(id_in(file, "docker"), Some(998));
        assert_eq!(id_in(file, "broken"), None);
        assert_eq!(id_in(file, "broken2"), None);
        assert_eq!(id_in(file, "doc"), None);
        assert_eq!(id_of("17").unwrap(), 17);
    }
}
