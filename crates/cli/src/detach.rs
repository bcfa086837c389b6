//! The keys by which a client leaves a proc alone.

/// As Docker has them.
pub const DETACH_KEYS: &str = "ctrl-p,ctrl-q";

/// Bytes that a terminal sends for the keys of a sequence, none for no such keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keys(Vec<u8>);

/// Reads `ctrl-p,ctrl-q`.
pub fn parse_keys(text: &str) -> Result<Keys, String> {
    let key = |word: &str| match (word.strip_prefix("ctrl-").unwrap_or("").as_bytes(), word.as_bytes()) {
        ([letter @ (b'a'..=b'z' | b'@' | b'['..=b'_')], _) => Ok(letter & 0x1f),
        (_, [letter]) if letter.is_ascii_graphic() => Ok(*letter),
        _ => Err(format!(
            "{word:?} is no key: write a letter, or ctrl- and one of a to z @ [ \\ ] ^ _, with commas between"
        )),
    };
    match text {
        "" => Ok(Keys(Vec::new())),
        text => text.split(',').map(key).collect::<Result<_, _>>().map(Keys),
    }
}

/// Finds a sequence of keys in what is typed. Keys that may begin it are held back until it is
/// clear whether they do.
#[derive(Debug)]
pub struct Watch {
    keys: Vec<u8>,
    held: usize,
}

/// What was typed.
#[derive(Debug, PartialEq, Eq)]
pub struct Passed {
    /// For the program.
    pub bytes: Vec<u8>,
    /// The client leaves.
    pub is_complete: bool,
}

impl Watch {
    pub fn new(keys: &Keys) -> Watch {
        Watch { keys: keys.0.clone(), held: 0 }
    }

    /// What of `typed` is for the program, and whether the sequence is complete.
    pub fn pass(&mut self, typed: &[u8]) -> Passed {
        let mut passed = Vec::with_capacity(typed.len() + self.held);
        for byte in typed {
            if self.keys.get(self.held) == Some(byte) {
                self.held += 1;
                if self.held == self.keys.len() {
                    return Passed { bytes: passed, is_complete: true };
                }
                continue;
            }
            passed.extend(&self.keys[..self.held]);
            self.held = usize::from(self.keys.first() == Some(byte));
            if self.held == 0 {
                passed.push(*byte);
            }
        }
        Passed { bytes: passed, is_complete: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_the_bytes_that_terminals_send() {
        assert_eq!(parse_keys(DETACH_KEYS).unwrap(), Keys(vec![16, 17]));
        assert_eq!(parse_keys("ctrl-[,a").unwrap(), Keys(vec![27, b'a']));
        assert_eq!(parse_keys("").unwrap(), Keys(Vec::new()));
        for bad in ["ctrl-", "ctrl-!", "ab", "ctrl-p,", "ctrl-P"] {
            assert!(parse_keys(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_sequence_is_found_however_it_is_cut_and_all_else_is_passed() {
        let keys = Keys(vec![16, 17]);
        let mut watch = Watch::new(&keys);
        assert_eq!(watch.pass(b"ls\n").bytes, b"ls\n");
        assert_eq!(watch.pass(&[b'a', 16]).bytes, b"a", "held back");
        assert_eq!(watch.pass(b"b").bytes, [16, b'b']);
        assert_eq!(watch.pass(&[16, 16]).bytes, [16], "the second may begin it");
        assert_eq!(watch.pass(&[17]), Passed { bytes: vec![], is_complete: true });
        let mut another = Watch::new(&keys);
        assert_eq!(another.pass(&[b'x', b'\n', 16, 17, b'y']), Passed { bytes: b"x\n".to_vec(), is_complete: true });
        let mut none = Watch::new(&Keys(Vec::new()));
        assert_eq!(none.pass(&[16, 17]), Passed { bytes: vec![16, 17], is_complete: false });
    }
}
