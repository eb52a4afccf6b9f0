// A package with an assembly file may declare functions without a body. The one
// in bench_test.go has its body in the kubelet.
