//! Names of objects in a store, and what they say.
//!
//! Owns how an object is called. What a name says is believed of nothing but the name: what an
//! object is, its header says, and the caller that opens the object expects what the name promised
//! ([`crate::seal::Expect`]).
//!
//! ```text
//! realms/REALM/packs/PACK
//! realms/REALM/procs/PROC/gen-N-SALT
//! realms/REALM/procs/PROC/head
//! realms/REALM/collection
//! ```
//!
//! No name of a pack or front is ever used for a second writing, for both have the salt of their
//! own key in it. So a write that arrives late, after its writer gave it up or lost the proc, makes
//! garbage and replaces nothing.

use crate::ids::{FrontId, PackId, ProcId};
use kip_types::{Generation, Realm};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// One writing of a generation's front. Two writers may use the same number, never the same id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct FrontRef {
    /// The generation's number.
    pub generation: Generation,
    /// The salt of its key.
    pub id: FrontId,
}

impl fmt::Display for FrontRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gen-{}-{}", self.generation, self.id)
    }
}

/// What the name of an object says. Its text, by `Display`, is at most 199 bytes, of `a-z 0-9 - /`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ObjectName {
    /// Blocks of a realm.
    Pack {
        /// Whose.
        realm: Realm,
        /// Which.
        pack: PackId,
    },
    /// A generation's front.
    Front {
        /// Whose.
        realm: Realm,
        /// Of which proc.
        proc: ProcId,
        /// Which.
        front: FrontRef,
    },
    /// A proc's head.
    Head {
        /// Whose.
        realm: Realm,
        /// Of which proc.
        proc: ProcId,
    },
    /// What collectors and writers of a realm tell each other ([`crate::gc::Collection`]).
    Collection {
        /// Whose.
        realm: Realm,
    },
    /// Nothing that a Kip of this version writes: left alone by everything here.
    Foreign(String),
}

impl ObjectName {
    /// What a name says. Only what `Display` would write is anything but foreign.
    pub fn parse(text: &str) -> ObjectName {
        ObjectName::parsed(text)
            .filter(|name| name.to_string() == text)
            .unwrap_or_else(|| ObjectName::Foreign(text.to_owned()))
    }

    fn parsed(text: &str) -> Option<ObjectName> {
        let parts: Vec<&str> = text.split('/').collect();
        let ["realms", realm, kind, rest @ ..] = &parts[..] else { return None };
        let realm: Realm = realm.parse().ok()?;
        Some(match (*kind, rest) {
            ("collection", []) => ObjectName::Collection { realm },
            ("packs", [pack]) => ObjectName::Pack { realm, pack: pack.parse().ok()? },
            ("procs", [proc, "head"]) => ObjectName::Head { realm, proc: proc.parse().ok()? },
            ("procs", [proc, front]) => {
                let (number, id) = front.strip_prefix("gen-")?.split_once('-')?;
                let generation = Generation(u64::from_str(number).ok()?);
                let front = FrontRef { generation, id: id.parse().ok()? };
                ObjectName::Front { realm, proc: proc.parse().ok()?, front }
            }
            _ => return None,
        })
    }

    /// What all names of a realm's objects begin with, before a slash.
    pub fn of_realm(realm: &Realm) -> String {
        format!("realms/{realm}")
    }

    /// What the names of all of a proc's fronts and of its head begin with, before a slash.
    pub fn of_proc(realm: &Realm, proc: ProcId) -> String {
        format!("realms/{realm}/procs/{proc}")
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ObjectName::Pack { realm, pack } => write!(f, "realms/{realm}/packs/{pack}"),
            ObjectName::Front { realm, proc, front } => write!(f, "realms/{realm}/procs/{proc}/{front}"),
            ObjectName::Head { realm, proc } => write!(f, "realms/{realm}/procs/{proc}/head"),
            ObjectName::Collection { realm } => write!(f, "realms/{realm}/collection"),
            ObjectName::Foreign(text) => f.write_str(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn realm() -> impl Strategy<Value = Realm> {
        "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?".prop_map(|text| text.parse().unwrap())
    }

    fn name() -> impl Strategy<Value = ObjectName> {
        let pack = (realm(), any::<[u8; 32]>()).prop_map(|(realm, id)| ObjectName::Pack { realm, pack: PackId(id) });
        let front = (realm(), any::<[u8; 16]>(), any::<u64>(), any::<[u8; 32]>()).prop_map(|(realm, proc, n, id)| {
            let front = FrontRef { generation: Generation(n), id: FrontId(id) };
            ObjectName::Front { realm, proc: ProcId(proc), front }
        });
        let head = (realm(), any::<[u8; 16]>()).prop_map(|(realm, id)| ObjectName::Head { realm, proc: ProcId(id) });
        let collection = realm().prop_map(|realm| ObjectName::Collection { realm });
        prop_oneof![pack, front, head, collection]
    }

    proptest! {
        #[test]
        fn every_name_is_read_as_it_is_written(name in name()) {
            let text = name.to_string();
            prop_assert!(text.len() <= 200, "{} bytes", text.len());
            prop_assert!(text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-/".contains(&b)));
            prop_assert_eq!(ObjectName::parse(&text), name);
        }

        #[test]
        fn any_text_comes_back(text in "(realms/)?(a/)?(packs|procs)?/?[0-9a-f]{0,40}/?(head|gen-)?[0-9+]{0,3}-?.{0,70}") {
            prop_assert_eq!(ObjectName::parse(&text).to_string(), text);
        }
    }

    #[test]
    fn what_kip_does_not_write_is_foreign() {
        let (proc, salt) = (ProcId([0xab; 16]), FrontId([0xcd; 32]));
        let front = |number: &str| format!("realms/blue/procs/{proc}/gen-{number}-{salt}");
        let parsed = ObjectName::parse(&front("7"));
        let expected = FrontRef { generation: Generation(7), id: salt };
        assert!(matches!(parsed, ObjectName::Front { front, .. } if front == expected), "{parsed:?}");
        let shorter = front("7");
        let bad = [
            front("07"),
            front("+7"),
            front(""),
            front("18446744073709551616"),
            format!("{}/x", front("7")),
            shorter[..shorter.len() - 1].to_owned(),
            front("7").replace("cd", "CD"),
            format!("/{}", front("7")),
            format!("realms/blue/procs/{proc}/gen-7"),
            format!("realms/blue/procs/{proc}/head/"),
            format!("realms/Blue/procs/{proc}/head"),
            format!("realms/blue/packs/{proc}"),
            "realms/blue/packs/".to_owned(),
            String::new(),
        ];
        for text in bad {
            assert_eq!(ObjectName::parse(&text), ObjectName::Foreign(text.clone()), "{text}");
        }
    }
}
