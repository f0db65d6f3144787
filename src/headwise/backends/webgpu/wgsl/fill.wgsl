// Every word of y becomes `word`.
{{ output("y", "u32", 1) }}
{{ params("words: u32, word: u32") }}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let i = (group.x + group.y * groups.x) * 256u + thread;
    if (i < params.words) {
        store_y(i, params.word);
    }
}
