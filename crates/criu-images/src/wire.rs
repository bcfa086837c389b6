//! A protobuf message as a list of fields, whatever they mean, so that an image can be edited
//! without knowing all of its schema and nothing that a newer CRIU put there is lost.
//!
//! Source: the protobuf encoding specification (wire types 0, 1, 2 and 5; groups are not used by
//! CRIU).

/// One field's value on the wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FieldValue {
    /// Wire type 0.
    Varint(u64),
    /// Wire type 1.
    Fixed64(u64),
    /// Wire type 2: bytes, a string or an embedded message.
    Bytes(Vec<u8>),
    /// Wire type 5.
    Fixed32(u32),
}

/// A message: its fields in the order of the wire.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Message(pub Vec<(u32, FieldValue)>);

/// The bytes are not a protobuf message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a protobuf message (byte {at})")]
pub struct Malformed {
    /// Offset of what could not be read.
    pub at: usize,
}

fn read_varint(bytes: &[u8], at: &mut usize) -> Result<u64, Malformed> {
    let mut value = 0u64;
    for shift in (0..70).step_by(7) {
        let byte = *bytes.get(*at).ok_or(Malformed { at: *at })?;
        *at += 1;
        if shift < 64 {
            value |= u64::from(byte & 0x7f) << shift;
        }
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(Malformed { at: *at })
}

fn write_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn take<'a>(bytes: &'a [u8], at: &mut usize, len: usize) -> Result<&'a [u8], Malformed> {
    let end = at.checked_add(len).ok_or(Malformed { at: *at })?;
    let slice = bytes.get(*at..end).ok_or(Malformed { at: *at })?;
    *at = end;
    Ok(slice)
}

impl Message {
    /// Reads a message; every byte must belong to a field.
    pub fn decode(bytes: &[u8]) -> Result<Message, Malformed> {
        let mut at = 0;
        let mut fields = Vec::new();
        while at < bytes.len() {
            let key = read_varint(bytes, &mut at)?;
            let number = u32::try_from(key >> 3).map_err(|_| Malformed { at })?;
            let value = match key & 7 {
                0 => FieldValue::Varint(read_varint(bytes, &mut at)?),
                1 => FieldValue::Fixed64(u64::from_le_bytes(take(bytes, &mut at, 8)?.try_into().expect("8 bytes"))),
                2 => {
                    let len = usize::try_from(read_varint(bytes, &mut at)?).map_err(|_| Malformed { at })?;
                    FieldValue::Bytes(take(bytes, &mut at, len)?.to_vec())
                }
                5 => FieldValue::Fixed32(u32::from_le_bytes(take(bytes, &mut at, 4)?.try_into().expect("4 bytes"))),
                _ => return Err(Malformed { at }),
            };
            fields.push((number, value));
        }
        Ok(Message(fields))
    }

    /// The message's bytes; those it was read from if nothing was changed.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for (number, value) in &self.0 {
            let key = |wire: u64| u64::from(*number) << 3 | wire;
            match value {
                FieldValue::Varint(v) => {
                    write_varint(&mut out, key(0));
                    write_varint(&mut out, *v);
                }
                FieldValue::Fixed64(v) => {
                    write_varint(&mut out, key(1));
                    out.extend_from_slice(&v.to_le_bytes());
                }
                FieldValue::Bytes(v) => {
                    write_varint(&mut out, key(2));
                    write_varint(&mut out, v.len() as u64);
                    out.extend_from_slice(v);
                }
                FieldValue::Fixed32(v) => {
                    write_varint(&mut out, key(5));
                    out.extend_from_slice(&v.to_le_bytes());
                }
            }
        }
        out
    }

    /// The last varint of that number (protobuf: the last one wins); none if absent.
    pub fn varint(&self, number: u32) -> Option<u64> {
        self.0.iter().rev().find_map(|(n, v)| match v {
            FieldValue::Varint(v) if *n == number => Some(*v),
            _ => None,
        })
    }

    /// The varint of that number, 0 if absent.
    pub fn number(&self, number: u32) -> u64 {
        self.varint(number).unwrap_or(0)
    }

    /// Every varint of a repeated field, in order. CRIU writes one field each; the packed form, all
    /// in one, is as valid.
    pub fn varints(&self, number: u32) -> Result<Vec<u64>, Malformed> {
        let mut all = Vec::new();
        for (_, value) in self.0.iter().filter(|(n, _)| *n == number) {
            match value {
                FieldValue::Varint(v) => all.push(*v),
                FieldValue::Bytes(packed) => {
                    let mut at = 0;
                    while at < packed.len() {
                        all.push(read_varint(packed, &mut at)?);
                    }
                }
                FieldValue::Fixed64(_) | FieldValue::Fixed32(_) => {}
            }
        }
        Ok(all)
    }

    /// The bytes of that number.
    pub fn bytes(&self, number: u32) -> Option<&[u8]> {
        self.0.iter().rev().find_map(|(n, v)| match v {
            FieldValue::Bytes(v) if *n == number => Some(v.as_slice()),
            _ => None,
        })
    }

    /// The string of that number; what is not UTF-8 is replaced.
    pub fn string(&self, number: u32) -> Option<String> {
        self.bytes(number).map(|b| String::from_utf8_lossy(b).into_owned())
    }

    /// The embedded message of that number.
    pub fn message(&self, number: u32) -> Result<Option<Message>, Malformed> {
        self.bytes(number).map(Message::decode).transpose()
    }

    /// Every embedded message of that number, in order.
    pub fn messages(&self, number: u32) -> Result<Vec<Message>, Malformed> {
        self.0
            .iter()
            .filter_map(|(n, v)| match v {
                FieldValue::Bytes(v) if *n == number => Some(Message::decode(v)),
                _ => None,
            })
            .collect()
    }

    /// Sets a varint in place, or adds it.
    pub fn set_varint(&mut self, number: u32, value: u64) {
        self.set(number, FieldValue::Varint(value));
    }

    /// Sets bytes in place, or adds them.
    pub fn set_bytes(&mut self, number: u32, value: Vec<u8>) {
        self.set(number, FieldValue::Bytes(value));
    }

    fn set(&mut self, number: u32, value: FieldValue) {
        match self.0.iter_mut().rev().find(|(n, _)| *n == number) {
            Some((_, old)) => *old = value,
            None => self.0.push((number, value)),
        }
    }

    /// Removes every field of that number.
    pub fn remove(&mut self, number: u32) {
        self.0.retain(|(n, _)| *n != number);
    }

    /// Replaces the embedded messages of that number, one by one, by what `edit` makes of them.
    pub fn edit_messages<E: From<Malformed>>(
        &mut self,
        number: u32,
        mut edit: impl FnMut(&mut Message) -> Result<(), E>,
    ) -> Result<(), E> {
        for (n, value) in &mut self.0 {
            if let FieldValue::Bytes(bytes) = value
                && *n == number
            {
                let mut message = Message::decode(bytes)?;
                edit(&mut message)?;
                *bytes = message.encode();
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_back_what_it_wrote() {
        let mut inner = Message::default();
        inner.set_varint(1, 300);
        let mut m =
            Message(vec![(1, FieldValue::Varint(u64::MAX)), (7, FieldValue::Fixed32(5)), (9, FieldValue::Fixed64(6))]);
        m.set_bytes(3, inner.encode());
        let bytes = m.encode();
        let mut back = Message::decode(&bytes).unwrap();
        assert_eq!(back, m);
        assert_eq!(back.message(3).unwrap().unwrap().number(1), 300);
        back.edit_messages::<Malformed>(3, |i| {
            i.set_varint(1, 301);
            Ok(())
        })
        .unwrap();
        assert_eq!(back.message(3).unwrap().unwrap().number(1), 301);
        assert_eq!(back.varint(1), Some(u64::MAX));
    }

    #[test]
    fn repeated_varints_come_packed_or_one_by_one() {
        let m = Message(vec![
            (4, FieldValue::Varint(300)),
            (5, FieldValue::Varint(1)),
            (4, FieldValue::Bytes(vec![0xac, 0x02, 0x07])),
            (4, FieldValue::Varint(0)),
        ]);
        assert_eq!(m.varints(4).unwrap(), [300, 300, 7, 0]);
        assert!(m.varints(6).unwrap().is_empty());
        assert!(Message(vec![(4, FieldValue::Bytes(vec![0xac]))]).varints(4).is_err());
    }

    #[test]
    fn refuses_cut_messages() {
        assert!(Message::decode(&[0x08]).is_err());
        assert!(Message::decode(&[0x12, 5, 1]).is_err());
        assert!(Message::decode(&[0x0b]).is_err());
    }
}
