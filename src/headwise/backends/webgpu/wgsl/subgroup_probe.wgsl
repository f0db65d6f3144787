// The size of a subgroup, and whether its lanes are neighbouring threads of a workgroup, in order: kernels that share a row
// between neighbouring threads rely on both. result: (size, threads that are out of order).
{{ output("result", "u32", 1) }}
{{ params() }}

var<workgroup> out_of_order: atomic<u32>;

@compute @workgroup_size(128)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(subgroup_invocation_id) lane: u32,
        @builtin(subgroup_size) size: u32) {
    if (thread == 0u) { atomicStore(&out_of_order, 0u); }
    workgroupBarrier();
    if (thread % size != lane) { atomicAdd(&out_of_order, 1u); }
    workgroupBarrier();
    if (thread == 0u) {
        store_result(0u, size);
        store_result(1u, atomicLoad(&out_of_order));
    }
}
