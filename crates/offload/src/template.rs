//! A template as one file, closed as a backup is ([`kip_archive::backup`]), and back.
//!
//! In clear it is the length of the next, u32 LE; what is known of the template
//! ([`CarriedTemplate`]), as JSON; its directory, as tar. All of it is authenticated on the way.
//!
//! Never says which id a template has here, nor gives it a name. The file gets its name when it is
//! whole and on the disk, and replaces nothing. A crash leaves nothing of an export
//! ([`Unnamed`]), and of an import a directory without a name, which the next daemon removes.

use crate::keys::{KeyLength, with_wrap};
use crate::{engine, processor};
use kip_archive::backup::{BackupError, BackupReader, BackupWriter, Content};
use kip_copy::tarred::{self, TarError, UntarError};
use kip_records::body::Pin;
use kip_records::checkpoints::CheckpointNote;
use kip_records::state::Record;
use kip_sandbox::init;
use kip_sys::clock::now_ms;
use kip_sys::fault;
use kip_sys::publish::Unnamed;
use kip_types::keys::KeysWrap;
use kip_types::{Generation, Spec, TemplateId};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Version of what is in such a file, once it is open.
const FORMAT: u32 = 1;
/// Most bytes of what is known of a template.
const KNOWN_MAX: u32 = 16 << 20;
/// What there is in a template's directory beside its records and its generation.
const PARTS: [&str; 5] = ["upper", "disk", "pins", "layer", "cloned"];
/// Of its generation, what is derived from the rest, or only for people.
const LEFT_OUT: [&str; 5] = ["wake.plan", "dump.log", "stats-dump", "restore.log", "stats-restore"];
/// Bytes that are compared at once.
const PIECE: usize = 64 << 10;

/// What is known of a template in a file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CarriedTemplate {
    /// At most [`FORMAT`].
    format: u32,
    /// The Kip that wrote it.
    kip: String,
    /// Its id where it was taken.
    pub id: TemplateId,
    /// What determines it on each machine alike: `kip_records::kind::Kind::asked`.
    pub asked: String,
    /// The engine that reads its generation.
    engine: String,
    /// What its program may use of a processor.
    cpu_features: Vec<String>,
    /// What its proc was asked to be.
    pub spec: Spec,
    /// What it sleeps in.
    pub record: Record,
    /// How it was taken.
    pub note: CheckpointNote,
}

impl CarriedTemplate {
    /// Of a template that was taken on this machine, with the engine of its generation.
    pub fn new(
        id: TemplateId,
        asked: String,
        engine: String,
        spec: Spec,
        record: Record,
        note: CheckpointNote,
    ) -> CarriedTemplate {
        let (kip, cpu_features) = (env!("CARGO_PKG_VERSION").to_owned(), processor::used_here());
        CarriedTemplate { format: FORMAT, kip, id, asked, engine, cpu_features, spec, record, note }
    }
}

/// There is no file.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each is what it means")]
pub enum TemplateExportError {
    #[error("{path} is there already: choose another name, or delete it")]
    Exists { path: PathBuf },
    #[error(transparent)]
    KeyLength(#[from] KeyLength),
    #[error(transparent)]
    Begin(#[from] BackupError),
    #[error("cannot write {path}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Tar(#[from] TarError),
    #[error("it was removed meanwhile")]
    Removed,
    #[error("it cannot be described")]
    Describe(#[from] serde_json::Error),
}

/// A file brings no template.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each is what it means")]
pub enum TemplateImportError {
    #[error("cannot read {path}")]
    Io {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    KeyLength(#[from] KeyLength),
    #[error("{path} cannot be opened")]
    Open {
        path: PathBuf,
        #[source]
        source: BackupError,
    },
    #[error("{path} is not whole: {what}")]
    Damaged { path: PathBuf, what: String },
    #[error("{path} has format {found}, this Kip reads up to {FORMAT}: upgrade Kip")]
    Newer { path: PathBuf, found: u64 },
    #[error("it was taken with {there}, and this machine has {here}: install {there} or newer here")]
    Engine { there: String, here: String },
    #[error(
        "its program may use {missing} of a processor, which the one of this machine lacks: have the proc leave a template here"
    )]
    Processor { missing: String },
    #[error(transparent)]
    Tar(#[from] UntarError),
}

/// Writes a template into a new file. Returns the file's length, bytes.
///
/// # Errors
/// [`TemplateExportError`]; there is no file.
pub fn export(
    directory: &Path,
    generation: Generation,
    carried: &CarriedTemplate,
    path: &Path,
    wrap: &KeysWrap,
) -> Result<u64, TemplateExportError> {
    let at = |source: io::Error| match source.kind() {
        io::ErrorKind::AlreadyExists => TemplateExportError::Exists { path: path.to_owned() },
        _ => TemplateExportError::Io { path: path.to_owned(), source },
    };
    let identity = || fs::metadata(directory).map(|found| found.ino()).map_err(|_| TemplateExportError::Removed);
    let before = identity()?;
    let unnamed = Unnamed::create(path, "kip-export").map_err(at)?;
    let sink = BufWriter::with_capacity(1 << 20, unnamed.file());
    let mut sink = with_wrap(wrap, |wrap| BackupWriter::begin(sink, Content::Template, wrap, now_ms()))??;
    let known = serde_json::to_vec(carried)?;
    let length = u32::try_from(known.len()).expect("a spec is short").to_le_bytes();
    sink.write_all(&length).and_then(|()| sink.write_all(&known)).map_err(at)?;
    let of_generation = kip_snapshot::path_of(Path::new(""), generation);
    let mut arguments: Vec<OsString> = ["--anchored", "--no-wildcards"].map(OsString::from).to_vec();
    arguments.extend(LEFT_OUT.map(|name| format!("--exclude={}", of_generation.join(name).display()).into()));
    let mut parts: Vec<PathBuf> = PARTS.iter().map(PathBuf::from).collect();
    parts.retain(|part| directory.join(part).exists());
    parts.push(of_generation);
    tarred::pack(&format!("template {}", carried.id), directory, &arguments, &parts, |from| {
        io::copy(from, &mut sink).map(drop).map_err(at)
    })?;
    // It was not removed, and nothing else of it changes.
    if identity().ok() != Some(before) {
        return Err(TemplateExportError::Removed);
    }
    sink.finish().and_then(|mut sink| sink.flush()).map_err(at)?;
    let bytes = unnamed.file().metadata().map_err(at)?.len();
    fault::reach("template-exported");
    unnamed.publish().map_err(at)?;
    Ok(bytes)
}

/// A file that is open, of which nothing is unpacked yet.
#[derive(Debug)]
pub struct OpenedTemplate {
    /// What is known of it.
    pub carried: CarriedTemplate,
    reader: BackupReader<BufReader<File>>,
    path: PathBuf,
}

/// Opens a file, and refuses what cannot go on on this machine, which has the engine `here`.
///
/// # Errors
/// [`TemplateImportError`].
pub fn open(path: &Path, wrap: &KeysWrap, here: &str) -> Result<OpenedTemplate, TemplateImportError> {
    let at = |source| TemplateImportError::Io { path: path.to_owned(), source };
    let damaged = |what: String| TemplateImportError::Damaged { path: path.to_owned(), what };
    let file = BufReader::new(File::open(path).map_err(at)?);
    let reader = with_wrap(wrap, |wrap| BackupReader::open(file, Content::Template, wrap))?;
    let mut reader = reader.map_err(|source| match source {
        BackupError::Io(source) => at(source),
        source => TemplateImportError::Open { path: path.to_owned(), source },
    })?;
    let mut length = [0; 4];
    reader.read_exact(&mut length).map_err(|e| unread(path, e))?;
    let length = u32::from_le_bytes(length);
    if length > KNOWN_MAX {
        return Err(damaged(format!("what it says of itself has {length} bytes")));
    }
    let mut known = vec![0; length as usize];
    reader.read_exact(&mut known).map_err(|e| unread(path, e))?;
    let unknown = |e: serde_json::Error| damaged(format!("what it says of itself cannot be read: {e}"));
    let known: serde_json::Value = serde_json::from_slice(&known).map_err(unknown)?;
    if let Some(found) = known["format"].as_u64().filter(|found| *found > u64::from(FORMAT)) {
        return Err(TemplateImportError::Newer { path: path.to_owned(), found });
    }
    let carried: CarriedTemplate = serde_json::from_value(known).map_err(unknown)?;
    if engine::check(&carried.engine, here).is_err() {
        return Err(TemplateImportError::Engine { there: carried.engine, here: here.to_owned() });
    }
    processor::check(&carried.cpu_features)
        .map_err(|lacking| TemplateImportError::Processor { missing: lacking.missing })?;
    Ok(OpenedTemplate { carried, reader, path: path.to_owned() })
}

/// A file that does not authenticate is damaged, and one that cannot be read is not.
fn unread(path: &Path, source: io::Error) -> TemplateImportError {
    match source.kind() {
        io::ErrorKind::InvalidData => TemplateImportError::Damaged { path: path.to_owned(), what: source.to_string() },
        io::ErrorKind::UnexpectedEof => {
            TemplateImportError::Damaged { path: path.to_owned(), what: "it ends too early".to_owned() }
        }
        _ => TemplateImportError::Io { path: path.to_owned(), source },
    }
}

impl OpenedTemplate {
    /// Unpacks all of it into a directory that has its records.
    ///
    /// # Errors
    /// [`TemplateImportError`]; what was unpacked until then is the caller's to remove.
    pub fn unpack(mut self, to: &Path) -> Result<(), TemplateImportError> {
        let apart = to.join("unpacked");
        let at = |path: &Path| {
            let path = path.to_owned();
            move |source| TemplateImportError::Io { path, source }
        };
        fs::create_dir(&apart).map_err(at(&apart))?;
        tarred::unpack(&mut self.reader, &apart).map_err(|e| match e {
            UntarError::Read(source) => unread(&self.path, source),
            e => e.into(),
        })?;
        // No record is the file's, and nothing in it leads elsewhere where it is read by its name.
        for entry in fs::read_dir(&apart).map_err(at(&apart))? {
            let entry = entry.map_err(at(&apart))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_part = PARTS.contains(&name.as_str()) || name.starts_with("gen-");
            if !is_part || !is_plain(&entry.path()).map_err(at(&entry.path()))? {
                let what = format!("it has {name}, as no export has it");
                return Err(TemplateImportError::Damaged { path: self.path.clone(), what });
            }
            fs::rename(entry.path(), to.join(&name)).map_err(at(&entry.path()))?;
        }
        fs::remove_dir(&apart).map_err(at(&apart))
    }
}

/// Whether a part of a template is what an export has under that name: a generation has regular
/// files only, and no part is a link.
fn is_plain(path: &Path) -> io::Result<bool> {
    let kind = fs::symlink_metadata(path)?.file_type();
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if !name.starts_with("gen-") {
        return Ok(kind.is_dir() || kind.is_file());
    }
    let mut entries = if kind.is_dir() { fs::read_dir(path)? } else { return Ok(false) };
    Ok(entries.all(|entry| entry.and_then(|entry| entry.file_type()).is_ok_and(|kind| kind.is_file())))
}

/// The first file of a base that a template has mapped and that is another one on this machine:
/// what begins from it would run another version than what starts.
///
/// # Errors
/// A pinned file cannot be read.
pub fn other_base_file<'a>(directory: &Path, pins: &'a [Pin]) -> io::Result<Option<&'a str>> {
    let below = |path: &str| directory.join("pins").join(path.trim_start_matches('/'));
    for pin in pins.iter().filter(|pin| pin.path != init::PATH) {
        let pinned = below(&pin.path);
        if !fs::symlink_metadata(&pinned)?.is_file() || !is_same(&pinned, Path::new(&pin.path))? {
            return Ok(Some(&pin.path));
        }
    }
    Ok(None)
}

/// Whether two files have the same bytes; a second one that is not there has not.
fn is_same(one: &Path, other: &Path) -> io::Result<bool> {
    let mut one = File::open(one)?;
    let Ok(mut other) = File::open(other) else { return Ok(false) };
    if one.metadata()?.len() != other.metadata()?.len() {
        return Ok(false);
    }
    let (mut bytes, mut others) = (vec![0; PIECE], vec![0; PIECE]);
    loop {
        let count = one.read(&mut bytes)?;
        if count == 0 {
            return Ok(true);
        }
        if other.read_exact(&mut others[..count]).is_err() || bytes[..count] != others[..count] {
            return Ok(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kip_records::body::PinId;
    use kip_types::keys::Hex;
    use kip_types::{State, chain};

    const GENERATION: Generation = Generation(3);

    fn carried() -> CarriedTemplate {
        let spec = serde_json::json!({"name": "web", "command": ["/bin/true"]});
        let state = State::Parked { generation: GENERATION };
        let note = CheckpointNote {
            parent: None,
            taken_at_ms: 1,
            was_awake: true,
            first_id: 65536,
            memory_bytes: 2,
            file_bytes: 3,
            still_us: 4,
            total_us: 5,
        };
        CarriedTemplate::new(
            "t1".parse().unwrap(),
            "hash".to_owned(),
            "criu 4.2".to_owned(),
            serde_json::from_value(spec).unwrap(),
            Record { state, ..Record::new(1, "/base".into()) },
            note,
        )
    }

    fn key() -> KeysWrap {
        KeysWrap::Key(Hex(vec![7; 32]))
    }

    /// A template's directory, and a place for others.
    fn template(place: &Path) -> PathBuf {
        let directory = place.join("t1");
        fs::create_dir_all(directory.join("upper/root")).unwrap();
        fs::create_dir_all(directory.join("gen-3")).unwrap();
        for (name, text) in [("upper/root/file", "own"), ("gen-3/pages-1.img", "memory"), ("gen-3/wake.plan", "plan")] {
            fs::write(directory.join(name), text).unwrap();
        }
        fs::write(directory.join("spec.json"), "{}").unwrap();
        directory
    }

    #[test]
    fn a_template_comes_back_without_its_records_and_what_is_derived() {
        let place = tempfile::tempdir().unwrap();
        let (directory, file) = (template(place.path()), place.path().join("file"));
        let bytes = export(&directory, GENERATION, &carried(), &file, &key()).unwrap();
        assert_eq!(fs::metadata(&file).unwrap().len(), bytes);
        let there = export(&directory, GENERATION, &carried(), &file, &key()).unwrap_err().to_string();
        assert!(there.contains("is there already"), "{there}");
        let opened = open(&file, &key(), "criu 4.2.1").unwrap();
        assert_eq!((opened.carried.id.as_str(), opened.carried.asked.as_str()), ("t1", "hash"));
        let to = place.path().join("to");
        fs::create_dir(&to).unwrap();
        opened.unpack(&to).unwrap();
        assert_eq!(fs::read(to.join("gen-3/pages-1.img")).unwrap(), b"memory");
        assert_eq!(fs::read(to.join("upper/root/file")).unwrap(), b"own");
        assert!(!to.join("gen-3/wake.plan").exists() && !to.join("spec.json").exists());
        let gone = export(&place.path().join("none"), GENERATION, &carried(), &place.path().join("x"), &key());
        assert!(gone.unwrap_err().to_string().contains("removed meanwhile"));
    }

    // promise templates: a file of another processor, another engine, a newer Kip, another kind, or
    //   that is cut or changed anywhere, brings nothing, and why is one line
    // held by: this, `tests/test_template_files.py::test_what_cannot_be_imported`
    #[test]
    fn what_cannot_go_on_here_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let directory = template(place.path());
        let number = std::cell::Cell::new(0);
        let refused = |change: &dyn Fn(&mut CarriedTemplate)| {
            number.set(number.get() + 1);
            let (file, mut carried) = (place.path().join(format!("file-{}", number.get())), carried());
            change(&mut carried);
            export(&directory, GENERATION, &carried, &file, &key()).unwrap();
            open(&file, &key(), "criu 4.2.1").map(drop).map_err(|e| chain(&e)).err()
        };
        assert_eq!(refused(&|_| ()), None);
        // No processor has all three.
        let cpu = |carried: &mut CarriedTemplate| {
            carried.cpu_features = ["3dnow", "xop", "amx_tile"].map(str::to_owned).to_vec()
        };
        assert!(refused(&cpu).unwrap().contains("the one of this machine lacks"));
        let engine = refused(&|carried| carried.engine = "criu 9.0".to_owned()).unwrap();
        assert_eq!(
            engine,
            "it was taken with criu 9.0, and this machine has criu 4.2.1: install criu 9.0 or newer here"
        );
        assert!(refused(&|carried| carried.format = 2).unwrap().contains("has format 2, this Kip reads up to 1"));
        let file = place.path().join("file-1");
        let whole = fs::read(&file).unwrap();
        let to = place.path().join("to");
        fs::create_dir(&to).unwrap();
        for end in (0..whole.len()).step_by(97).chain([whole.len() - 1]) {
            let mut flipped = whole.clone();
            flipped[end] ^= 1;
            for bytes in [&whole[..end], &flipped] {
                fs::write(&file, bytes).unwrap();
                let read = open(&file, &key(), "criu 4.2.1").and_then(|opened| opened.unpack(&to));
                assert!(read.is_err(), "byte {end}");
            }
        }
    }

    #[test]
    fn another_file_of_the_machine_is_found() {
        let place = tempfile::tempdir().unwrap();
        let pins = place.path().join("pins/usr/bin");
        fs::create_dir_all(&pins).unwrap();
        fs::copy("/usr/bin/true", pins.join("true")).unwrap();
        let id = PinId { dev: 0, ino: 0, size: 0, stamp: 0 };
        let pin = |path: &str| Pin { path: path.to_owned(), id };
        let of = [pin(init::PATH), pin("/usr/bin/true")];
        assert_eq!(other_base_file(place.path(), &of).unwrap(), None);
        fs::write(pins.join("true"), "another").unwrap();
        assert_eq!(other_base_file(place.path(), &of).unwrap(), Some("/usr/bin/true"));
        fs::write(pins.join("no-such"), "another").unwrap();
        assert_eq!(other_base_file(place.path(), &[pin("/usr/bin/no-such")]).unwrap(), Some("/usr/bin/no-such"));
    }

    #[test]
    fn a_part_that_leads_elsewhere_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["upper", "gen-1", "gen-2"] {
            fs::create_dir(path(name)).unwrap();
        }
        fs::write(path("cloned"), "").unwrap();
        fs::write(path("gen-1/pages.map"), "").unwrap();
        for (name, to) in
            [("layer", "/etc"), ("gen-2/pages.map", "/etc/passwd"), ("gen-3", "gen-1"), ("upper/any", "/")]
        {
            std::os::unix::fs::symlink(to, path(name)).unwrap();
        }
        let plain = |name: &str| is_plain(&path(name)).unwrap();
        assert_eq!(["upper", "gen-1", "cloned"].map(plain), [true; 3], "in a proc's own files links are as they are");
        assert_eq!(["layer", "gen-2", "gen-3"].map(plain), [false; 3]);
    }
}
