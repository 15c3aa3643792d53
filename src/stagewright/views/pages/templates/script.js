(function () {
  'use strict';
  var data = JSON.parse(document.getElementById('data').textContent);
  var root = document.documentElement, tip = document.getElementById('tip');
  root.classList.add('js');
  function all(what, within) { return [].slice.call((within || document).querySelectorAll(what)); }

  function size(bytes) {
    var units = ['', 'k', 'M', 'G', 'T', 'P', 'E', 'Z'], at = 0;
    while (bytes >= 999.5 && at < 7) { bytes /= 1000; at++; }
    return bytes ? Number(bytes.toPrecision(3)) + ' ' + units[at] + 'B' : '0';
  }

  // What is under the pointer, next to it; titles say the same where there is no script.
  function show(event, words) {
    tip.textContent = words;
    tip.hidden = !words;
    var x = event.clientX + 14, y = event.clientY + 14;
    if (x + tip.offsetWidth > root.clientWidth - 4) x = Math.max(4, root.clientWidth - 4 - tip.offsetWidth);
    if (y + tip.offsetHeight > root.clientHeight - 4) y = event.clientY - 10 - tip.offsetHeight;
    tip.style.left = x + 'px';
    tip.style.top = y + 'px';
  }
  all('.chart svg title').forEach(function (title) {
    var mark = title.parentNode, words = title.textContent;
    mark.setAttribute('aria-label', words);
    mark.removeChild(title); // the browser would show it a second time
  });
  all('.chart svg').forEach(function (svg) {
    function point(event) {
      var mark = svg.dataset.held ? null : event.target.closest('[aria-label]');
      if (!svg.dataset.held) show(event, mark && mark !== svg ? mark.getAttribute('aria-label') : '');
    }
    svg.addEventListener('pointermove', point);
    svg.addEventListener('pointerdown', point);
    svg.addEventListener('pointerleave', function (event) {
      if (event.pointerType === 'mouse') tip.hidden = true; // a finger leaves where it taps
    });
  });
  document.addEventListener('pointerdown', function (event) {
    if (!event.target.closest('.chart svg')) tip.hidden = true;
  });
  window.addEventListener('scroll', function () { tip.hidden = true; }, {passive: true});

  // Tabs: a click, or the arrows, Home and End.
  all('.tabs').forEach(function (tabs) {
    var buttons = all(':scope > [role=tablist] > [role=tab]', tabs);
    function open(nth, focus) {
      buttons.forEach(function (button, at) {
        var chosen = at === nth;
        button.setAttribute('aria-selected', chosen);
        button.tabIndex = chosen ? 0 : -1;
        document.getElementById(button.getAttribute('aria-controls')).hidden = !chosen;
        if (chosen && focus) button.focus();
      });
    }
    buttons.forEach(function (button, nth) {
      button.addEventListener('click', function () { open(nth, false); });
      button.addEventListener('keydown', function (event) {
        var count = buttons.length;
        var to = {
          ArrowRight: (nth + 1) % count, ArrowLeft: (nth + count - 1) % count,
          Home: 0, End: count - 1
        }[event.key];
        if (to !== undefined) { open(to, true); event.preventDefault(); }
      });
    });
    open(0, false);
  });

  // Memory: a cursor that a pointer or keys move, and the bytes at its point.
  all('svg[data-held]').forEach(function (svg) {
    var name = svg.dataset.held, d = data[name], at = d.peak, count = d.task.length;
    var field = svg.dataset.field.split(' ').map(Number), cursor = svg.querySelector('.cursor');
    var out = document.getElementById('at-' + name);
    function move(nth) {
      at = Math.max(0, Math.min(count - 1, nth));
      var share = (d.x[at] + d.x[at + 1]) / 2, total = 0, parts = [];
      var x = field[0] + share * (field[1] - field[0]);
      cursor.setAttribute('d', 'M' + x.toFixed(1) + ' ' + field[2] + 'V' + field[3]);
      Object.keys(d.held).forEach(function (category) {
        var bytes = d.held[category][at];
        total += bytes;
        if (bytes) parts.push(category.replace('_', ' ') + ' ' + size(bytes));
      });
      return out.textContent = size(total) + ': ' + d.task[at] + ': ' + parts.join(', ');
    }
    function point(event) {
      var box = svg.getBoundingClientRect();
      var x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
      var share = (x - field[0]) / (field[1] - field[0]), nth = 0;
      while (nth < count - 1 && d.x[nth + 1] < share) nth++;
      show(event, move(nth));
    }
    svg.addEventListener('pointermove', point);
    svg.addEventListener('pointerdown', point);
    svg.addEventListener('focus', function () { move(at); });
    svg.addEventListener('keydown', function (event) {
      var by = event.shiftKey ? 10 : 1, to = {
        ArrowLeft: at - by, ArrowRight: at + by, Home: 0, End: count - 1, p: d.peak, P: d.peak
      }[event.key];
      if (to !== undefined) { move(to); event.preventDefault(); }
    });
  });

  // A link into details that are closed opens them.
  function reveal() {
    var target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    if (target && target.tagName === 'DETAILS') target.open = true;
  }
  window.addEventListener('hashchange', reveal);
  reveal();

  // The command, into the clipboard.
  all('pre.command').forEach(function (pre) {
    var button = document.createElement('button'), code = pre.querySelector('code');
    button.type = 'button';
    button.className = 'copy';
    button.textContent = 'Copy';
    button.addEventListener('click', function () {
      function said(done) { button.textContent = done ? 'Copied' : 'Press Ctrl+C'; }
      function choose() { // where pages from files have no clipboard
        getSelection().selectAllChildren(code);
        said(document.execCommand && document.execCommand('copy'));
      }
      if (navigator.clipboard) navigator.clipboard.writeText(code.textContent).then(said.bind(null, true), choose);
      else choose();
      setTimeout(function () { button.textContent = 'Copy'; }, 2000);
    });
    pre.appendChild(button);
  });
})();
