//! What of a processor a program can have come to rely on: a generation is not restored where some
//! of it is missing.
//!
//! A program asks its processor once what it can do and then uses that, C libraries for copying
//! memory. Where an instruction is not there the program would die of SIGILL some time after its
//! wake, so such a wake does not begin.

/// What programs can use, as /proc/cpuinfo spells it. Not what belongs to the kernel, nor what an
/// update of kernel or microcode takes away from a processor that had it (`rtm`, `hle`): that must
/// strand no sleeper.
const USED: [&str; 88] = [
    "3dnow",
    "3dnowext",
    "abm",
    "adx",
    "aes",
    "amx_bf16",
    "amx_complex",
    "amx_fp16",
    "amx_int8",
    "amx_tile",
    "avx",
    "avx2",
    "avx512_4fmaps",
    "avx512_4vnniw",
    "avx512_bf16",
    "avx512_bitalg",
    "avx512_fp16",
    "avx512_vbmi2",
    "avx512_vnni",
    "avx512_vp2intersect",
    "avx512_vpopcntdq",
    "avx512bw",
    "avx512cd",
    "avx512dq",
    "avx512er",
    "avx512f",
    "avx512ifma",
    "avx512pf",
    "avx512vbmi",
    "avx512vl",
    "avx_ifma",
    "avx_ne_convert",
    "avx_vnni",
    "avx_vnni_int16",
    "avx_vnni_int8",
    "bmi1",
    "bmi2",
    "cldemote",
    "clflushopt",
    "clwb",
    "clzero",
    "cmov",
    "cmpccxadd",
    "cx16",
    "cx8",
    "enqcmd",
    "f16c",
    "fma",
    "fma4",
    "fsgsbase",
    "fxsr",
    "gfni",
    "lahf_lm",
    "misalignsse",
    "mmx",
    "mmxext",
    "monitorx",
    "movbe",
    "movdir64b",
    "movdiri",
    "mwaitx",
    "ospke",
    "pclmulqdq",
    "pku",
    "pni",
    "popcnt",
    "prefetchwt1",
    "rdpid",
    "rdrand",
    "rdseed",
    "rdtscp",
    "serialize",
    "sha512",
    "sha_ni",
    "sm3",
    "sm4",
    "sse",
    "sse2",
    "sse4_1",
    "sse4_2",
    "sse4a",
    "ssse3",
    "tbm",
    "user_shstk",
    "vaes",
    "vpclmulqdq",
    "waitpkg",
    "xop",
];

/// All that the processor can do, from /proc/cpuinfo.
pub(crate) fn features(cpuinfo: &str) -> Vec<String> {
    let flags = cpuinfo.lines().find_map(|line| line.strip_prefix("flags")?.split_once(':'));
    flags.map_or_else(Vec::new, |(_, flags)| flags.split_whitespace().map(str::to_owned).collect())
}

/// What of this processor a program can have come to rely on.
pub fn used_here() -> Vec<String> {
    let mut here = features(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default());
    here.retain(|feature| USED.contains(&feature.as_str()));
    here
}

/// What a program that comes from a processor with `there` may use and one with `here` lacks.
fn missing<'a>(there: &'a [String], here: &[String]) -> Vec<&'a str> {
    let lacks = |feature: &&str| USED.contains(feature) && !here.iter().any(|has| has == feature);
    there.iter().map(String::as_str).filter(lacks).collect()
}

/// A generation must not be restored here.
#[derive(Debug, thiserror::Error)]
#[error("it comes from a processor with {missing}, which this one lacks: wake it on a machine that has them")]
pub struct Lacking {
    /// What is missing, as /proc/cpuinfo spells it.
    pub missing: String,
}

/// Whether this machine has all that a program may use which comes from a processor with `there`.
pub fn check(there: &[String]) -> Result<(), Lacking> {
    let here = features(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default());
    // Where nothing is told there is nothing to compare.
    let missing = if here.is_empty() { Vec::new() } else { missing(there, &here) };
    if missing.is_empty() { Ok(()) } else { Err(Lacking { missing: missing.join(", ") }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_program_may_use_must_be_there_and_what_is_the_kernels_need_not() {
        let cpu = |flags: &str| features(&format!("processor\t: 0\nvendor_id\t: X\nflags\t\t: {flags}\nbugs\t: a b\n"));
        let (new, old) = (cpu("fpu sse2 avx2 avx512f rtm hle ibrs hypervisor"), cpu("fpu sse2 avx2 xop"));
        assert_eq!(missing(&new, &old), ["avx512f"]);
        assert_eq!(missing(&old, &new), ["xop"]);
        assert!(missing(&new, &new).is_empty() && missing(&[], &old).is_empty());
        check(&features(&std::fs::read_to_string("/proc/cpuinfo").unwrap())).unwrap();
        // No processor has all three.
        let refused = check(&cpu("sse2 3dnow xop amx_tile")).unwrap_err().to_string();
        assert!(refused.contains("3dnow") || refused.contains("xop") || refused.contains("amx_tile"), "{refused}");
    }
}
