package cdctest

// Validate runs every validator that needs nothing but the log and the truth:
// Order, NoDuplicate, NoGap, Partition, Fold, OutboxOrder, Reads and Once. It reads the log once;
// what cannot be read is a violation of the rule Read.
func Validate(log *Log, truth *Truth, l Layout) []Violation {
	rule := func(name string) *findings { return &findings{rule: name} }
	read := rule("Read")
	items := log.items(read)
	all := read.list
	all = append(all, rule("Order").order(items, l)...)
	all = append(all, rule("NoDuplicate").noDuplicate(items)...)
	all = append(all, rule("NoGap").noGap(items, truth, l)...)
	all = append(all, rule("Partition").partition(items, log.Partitions)...)
	all = append(all, rule("Fold").fold(items, truth, l)...)
	all = append(all, rule("OutboxOrder").outboxOrder(items, truth, l)...)
	all = append(all, rule("Reads").reads(items, truth, l)...)
	return append(all, rule("Once").once(items, truth, l)...)
}
