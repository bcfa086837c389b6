//! `--format`: `json`, or a template of fields as Docker's and Podman's users write it:
//! `'{{.Name}} {{.State}}'`, after `table ` with aligned columns at each tab and a head. Owns the
//! form; the fields are the caller's. Of Go's templates there are fields alone: no functions,
//! conditions or loops.

use crate::table;
use kip_types::nearest;

/// What `--format` says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Format {
    /// One JSON object a line.
    Json,
    /// A line for each, of these parts; as a table with a head.
    Lines {
        /// The parts of a line.
        parts: Vec<TemplatePart>,
        /// With a head and aligned columns.
        is_table: bool,
    },
}

/// A part of a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TemplatePart {
    /// Itself.
    Text(String),
    /// The field of that name.
    Field(String),
    /// The value of the label with that key.
    Label(String),
}

/// Reads it; `fields` are those that there are.
///
/// # Errors
/// What is wrong with it.
pub fn parse(text: &str, fields: &[&str]) -> Result<Format, String> {
    let plain = text.trim();
    if matches!(plain, "json" | "{{json .}}" | "{{ json . }}") {
        return Ok(Format::Json);
    }
    let (body, is_table) = plain.strip_prefix("table ").map_or((text, false), |body| (body.trim(), true));
    let body = body.replace("\\t", "\t").replace("\\n", "\n");
    let mut parts = Vec::new();
    let mut rest = body.as_str();
    while let Some((before, after)) = rest.split_once("{{") {
        if !before.is_empty() {
            parts.push(TemplatePart::Text(before.to_owned()));
        }
        let (inside, after) = after.split_once("}}").ok_or("a {{ is not closed: write {{.FIELD}}")?;
        parts.push(part(inside.trim(), fields)?);
        rest = after;
    }
    if !rest.is_empty() {
        parts.push(TemplatePart::Text(rest.to_owned()));
    }
    if !parts.iter().any(|part| !matches!(part, TemplatePart::Text(_))) {
        return Err(format!(
            "there is no field in it: write json, or fields as {{{{.Name}}}}; there are {}",
            list(fields)
        ));
    }
    Ok(Format::Lines { parts, is_table })
}

fn part(inside: &str, fields: &[&str]) -> Result<TemplatePart, String> {
    let only = || format!("{{{{{inside}}}}} is not supported: of templates there are fields alone, {}", list(fields));
    let name = inside.strip_prefix('.').ok_or_else(only)?;
    if let Some(key) = name.strip_prefix("Label ") {
        let key = key.trim().trim_matches(['"', '`']);
        return Ok(TemplatePart::Label(key.to_owned()));
    }
    if fields.contains(&name) {
        return Ok(TemplatePart::Field(name.to_owned()));
    }
    if !name.chars().all(|c| c.is_ascii_alphanumeric()) {
        return Err(only());
    }
    let same = fields.iter().copied().find(|field| field.eq_ignore_ascii_case(name));
    match same.or_else(|| nearest(name, fields.iter().copied())) {
        Some(nearest) => Err(format!("there is no field .{name}: did you mean .{nearest}?")),
        None => Err(format!("there is no field .{name}: there are {}", list(fields))),
    }
}

fn list(fields: &[&str]) -> String {
    let all: Vec<String> = fields.iter().map(|field| format!(".{field}")).collect();
    format!("{} and .Label \"KEY\"", all.join(", "))
}

/// A line for each row, or a table of them. `value` is what a part that is no text stands for.
pub fn lines<T>(
    parts: &[TemplatePart],
    is_table: bool,
    rows: &[T],
    value: impl Fn(&T, &TemplatePart) -> String,
) -> String {
    let line = |of: &dyn Fn(&TemplatePart) -> String| -> String {
        let one = |part: &TemplatePart| if let TemplatePart::Text(text) = part { text.clone() } else { of(part) };
        parts.iter().map(one).collect()
    };
    let each = rows.iter().map(|row| line(&|part| value(row, part)));
    if !is_table {
        return each.map(|line| line + "\n").collect();
    }
    let head = line(&|part| match part {
        TemplatePart::Field(name) | TemplatePart::Label(name) | TemplatePart::Text(name) => name.to_uppercase(),
    });
    let cells = |line: String| line.split('\t').map(|cell| cell.trim().to_owned()).collect();
    table(&std::iter::once(head).chain(each).map(cells).collect::<Vec<Vec<String>>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIELDS: [&str; 2] = ["Name", "State"];

    fn shown(format: &str) -> String {
        let Format::Lines { parts, is_table } = parse(format, &FIELDS).unwrap() else { return "json".to_owned() };
        let rows = [("web", "running"), ("a-long-name", "parked")];
        lines(&parts, is_table, &rows, |row, part| match part {
            TemplatePart::Field(name) if name == "Name" => row.0.to_owned(),
            TemplatePart::Field(_) => row.1.to_owned(),
            TemplatePart::Label(key) => format!("<{key}>"),
            TemplatePart::Text(_) => unreachable!(),
        })
    }

    #[test]
    fn fields_stand_in_lines_and_tables() {
        assert_eq!(shown("{{.Name}} {{ .State }}!"), "web running!\na-long-name parked!\n");
        assert_eq!(shown(r"{{.Name}}\t{{.Label `team`}}"), "web\t<team>\na-long-name\t<team>\n");
        let table = "NAME         STATE\nweb          running\na-long-name  parked\n";
        assert_eq!(shown(r"table {{.Name}}\t{{.State}}"), table);
        assert_eq!((shown("json"), shown("{{json .}}")), ("json".to_owned(), "json".to_owned()));
    }

    #[test]
    fn what_is_not_supported_is_told() {
        let told = |format: &str| parse(format, &FIELDS).unwrap_err();
        assert_eq!(told("{{.Nam}}"), "there is no field .Nam: did you mean .Name?");
        assert_eq!(told("{{.name}}"), "there is no field .name: did you mean .Name?");
        assert!(told("{{if .Name}}x{{end}}").starts_with("{{if .Name}} is not supported: of templates there are"));
        assert!(told("{{.Name | upper}}").contains("is not supported"));
        assert!(told("{{.Name").contains("not closed"));
        assert!(told("plain").contains("no field") && told("").contains("no field"));
        assert!(told("{{.Mounts}}").contains("there are .Name, .State"));
    }
}
