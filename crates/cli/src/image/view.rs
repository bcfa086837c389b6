//! What `kip image` shows, as people read it.

use kip_text::{ago, bytes, one_line, table};
use kip_types::image::{ImageDetails, ImageView, ImagesRemoved};
use kip_types::name::ProcName;
use std::fmt::Write as _;

/// Digits of a digest that are shown: enough to name it by.
const DIGITS: usize = 12;

fn short(digest: &str) -> String {
    digest.trim_start_matches("sha256:").chars().take(DIGITS).collect()
}

fn names(procs: &[ProcName]) -> String {
    procs.iter().map(ProcName::as_str).collect::<Vec<_>>().join(", ")
}

/// `kip image pull` and `kip image load`.
pub fn pulled(image: &ImageView) -> String {
    let layers = image.layers.len();
    format!("{} is here: {}, {layers} layers, {}\n", image.reference, short(&image.digest), bytes(image.bytes))
}

/// `kip image ls`.
pub fn ls(views: &[ImageView]) -> String {
    if views.is_empty() {
        return "there are no images\n".to_owned();
    }
    let mut rows = vec![["IMAGE", "ID", "LAYERS", "SIZE", "AGE", "PROCS"].map(str::to_owned).to_vec()];
    for view in views {
        let procs = if view.procs.is_empty() { "-".to_owned() } else { names(&view.procs) };
        rows.push(vec![
            view.reference.clone(),
            short(&view.id),
            view.layers.len().to_string(),
            bytes(view.bytes),
            ago(view.at_ms).trim_end_matches(" ago").to_owned(),
            procs,
        ]);
    }
    table(&rows)
}

/// `kip image inspect`.
pub fn inspect(details: &ImageDetails) -> String {
    let (view, config) = (&details.view, &details.config);
    let words = |words: &[String]| words.iter().map(|w| one_line(w)).collect::<Vec<_>>().join(" ");
    let mut rows = vec![
        ("image", view.reference.clone()),
        ("digest", view.digest.clone()),
        ("id", view.id.clone()),
        ("from", one_line(&view.source)),
        ("size", bytes(view.bytes)),
        ("procs", names(&view.procs)),
        ("entrypoint", words(&config.entrypoint)),
        ("arguments", words(&config.cmd)),
    ];
    rows.extend(config.env.iter().map(|line| ("environment", one_line(line))));
    rows.push(("user", one_line(&config.user)));
    rows.push(("directory", one_line(&config.workdir)));
    rows.push(("ports", words(&config.exposed_ports)));
    rows.push(("stop signal", one_line(&config.stop_signal)));
    let volume = |path: &String| ("volume", format!("{} (an ordinary directory of the proc's own)", one_line(path)));
    rows.extend(config.volumes.iter().map(volume));
    let rows: Vec<Vec<String>> =
        rows.into_iter().filter(|(_, text)| !text.is_empty()).map(|(key, text)| vec![key.to_owned(), text]).collect();
    let mut text = table(&rows);
    let mut layers = vec![vec!["LAYER".to_owned(), "SIZE".to_owned()]];
    for layer in &details.layer_views {
        let size = layer.bytes.map_or_else(|| "not here".to_owned(), bytes);
        layers.push(vec![short(&layer.digest), size]);
    }
    let _ = write!(text, "\n{}", table(&layers));
    for layer in details.layer_views.iter().filter(|layer| !layer.left_out.is_empty()) {
        let _ = writeln!(text, "\nleft out of {}:", short(&layer.digest));
        for line in &layer.left_out {
            let _ = writeln!(text, "  {}", one_line(line));
        }
    }
    text
}

/// `kip image rm` and `kip image gc`.
pub fn removed(done: &ImagesRemoved, dry_run: bool) -> String {
    let mut text = String::new();
    let verb = if dry_run { "would be removed" } else { "removed" };
    for reference in &done.references {
        let _ = writeln!(text, "{reference} {verb}");
    }
    let _ = writeln!(text, "{} layers {verb}, {}", done.layers.len(), bytes(done.bytes));
    if !done.kept_for.is_empty() {
        let _ = writeln!(text, "layers stay for {}", names(&done.kept_for));
    }
    text
}
